// The settings of the page: what its sliders offer, how one setting makes way for another, and the
// words of a setting, such as "dynatree tau=0.02 T=0.7", which the address and the command use.
//
// A setting is a method, the values of its settings, and the temperature of the draft.

const recording = new Recording(data);
const LABELS = { linear: "chain", dynatree: "DynaTree", dyspec: "DySpec" }; // of other names

// Pairs of settings of which the first must be less than the second, or equal to it.
const ORDERS = [
  { low: "B_min", high: "B_mid" }, { low: "B_mid", high: "B_max" }, { low: "D0", high: "D_max" },
  { low: "tau_l", high: "tau_h", isStrict: true },
  { low: "rho_stop", high: "rho_deep", isStrict: true },
];

// All settings of a method by name, each with its values, default and meaning.
function slidersOf(method) {
  return Object.assign({}, ...Object.values(data.methods[method].groups));
}

function defaultsOf(method) {
  const entries = Object.entries(slidersOf(method));
  return Object.fromEntries(entries.map(([name, { default: value }]) => [name, value]));
}

function startOf(method) {
  return { method, settings: defaultsOf(method), temperature: data.draft_temperature };
}

// The settings with one of them changed. Others make way for it; if they cannot, nothing changes.
function withValue(method, settings, name, value) {
  const changed = { ...settings, [name]: value };
  const sliders = slidersOf(method);
  const isRaised = value > settings[name];
  const pairs = ORDERS.filter(({ low, high }) => low in settings && high in settings);
  for (const { low, high, isStrict } of isRaised ? pairs : pairs.reverse()) {
    const isOrdered = (a, b) => (isStrict ? a < b : a <= b);
    if (isOrdered(changed[low], changed[high])) continue;
    const [moved, found] = isRaised
      ? [high, sliders[high].values.find((each) => isOrdered(changed[low], each))]
      : [low, sliders[low].values.findLast((each) => isOrdered(each, changed[high]))];
    if (found === undefined) return settings;
    changed[moved] = found;
  }
  return changed;
}

function wordOf(value) {
  return typeof value === "boolean" ? (value ? "on" : "off") : String(value);
}

// The settings that differ from their defaults, as words.
function changedWords({ method, settings }) {
  const defaults = defaultsOf(method);
  const names = Object.keys(settings).filter((name) => settings[name] !== defaults[name]);
  return names.map((name) => `${name}=${wordOf(settings[name])}`);
}

function usesTemperature({ method }) {
  return data.methods[method].uses_temperature;
}

function wordsOf(setting) {
  const { method, temperature } = setting;
  const isOwn = usesTemperature(setting) && temperature !== data.draft_temperature;
  return [method, ...changedWords(setting), ...(isOwn ? [`T=${temperature}`] : [])].join(" ");
}

// The setting of some words, without those that no slider offers; null if there is no such method.
function parseWords(text) {
  const [method, ...words] = text.split(" ");
  if (!Object.hasOwn(data.methods, method)) return null;
  const found = startOf(method);
  const sliders = slidersOf(method);
  for (const word of words) {
    const [name, given] = word.split("=");
    const value = { on: true, off: false }[given] ?? Number(given);
    if (name === "T" && recording.temperatures.includes(value)) found.temperature = value;
    if (sliders[name]?.values.includes(value)) {
      found.settings = withValue(method, found.settings, name, value);
    }
  }
  return found;
}

// The command whose run has this text and these trees.
function commandOf(setting) {
  const { method, temperature } = setting;
  const words = [...data.command, "--method", method];
  for (const word of changedWords(setting)) words.push("--set", word);
  if (usesTemperature(setting)) words.push("--draft-temperature", String(temperature));
  return words.map(shellWord).join(" ");
}
