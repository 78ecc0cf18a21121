// The controls: the methods, a slider or switch for each setting of the current one, the
// temperature of the draft, and the prices.

const PRICE_VALUES = [
  0, 0.0007, 0.002, 0.005, 0.0133, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.25, 0.32, 0.5, 0.7,
];
const SHARED = { // of all methods, by group
  "Draft model": {
    temperature: {
      label: "T", values: recording.temperatures,
      meaning: "temperature that divides the draft’s logits. Below 1 its probabilities are " +
        `sharper. ${data.draft_temperature} suits greedy text; the paper has 1`,
    },
  },
  "Prices, in iterations of ar": {
    row: { label: "R", values: PRICE_VALUES, meaning: "price of a row of the target’s pass" },
    draftPass: { label: "D", values: PRICE_VALUES, meaning: "price of a pass of the draft model" },
  },
};
const controls = new Map(); // name -> { input, output, values }
let shownMethod = null;

function buildMethods() {
  byId("methods").append(...Object.keys(data.methods).map((name) => {
    const input = html("input", { type: "radio", name: "method", value: name });
    input.addEventListener("change", () => {
      state.now = latest.get(name) ?? startOf(name);
      update();
    });
    const title = data.methods[name].about;
    return html("label", { title }, input, html("span", {}, LABELS[name] ?? name));
  }));
  byId("prices").append(html("option", { value: "" }, "prices of your own"));
  for (const name of Object.keys(data.prices)) byId("prices").append(html("option", {}, name));
  byId("prices").addEventListener("change", ({ target }) => {
    if (target.value) state.prices = pricesOf(target.value);
    update();
  });
}

function pricesOf(name) {
  const [row, draftPass] = data.prices[name];
  return { row, draftPass };
}

function buildSliders(method) {
  shownMethod = method;
  controls.clear();
  const about = html("p", { class: "legend" }, data.methods[method].about);
  const own = Object.entries(data.methods[method].groups).map((group) => groupOf(...group));
  byId("sliders").replaceChildren(about, ...own);
  const shared = Object.entries(SHARED).map((group) => groupOf(...group));
  if (!data.methods[method].uses_temperature) shared.shift();
  byId("shared").replaceChildren(...shared);
}

function groupOf(title, settings) {
  const rows = Object.entries(settings).map(([name, setting]) => controlOf(name, setting));
  return html("fieldset", {}, html("legend", {}, title), ...rows);
}

function controlOf(name, { values, meaning, label = name }) {
  const isSwitch = typeof values[0] === "boolean";
  const kind = isSwitch ? { type: "checkbox" } : { type: "range", min: 0, max: values.length - 1 };
  const input = html("input", { id: `set-${name}`, ...kind });
  const output = html("output", { for: `set-${name}` });
  const row = html("div", { class: classes({ control: true, switch: isSwitch }), title: meaning },
    html("label", { for: `set-${name}` }, html("code", {}, label)), input, output);
  const explain = () => byId("hint").replaceChildren(html("b", {}, label), `: ${meaning}.`);
  for (const event of ["pointerenter", "focusin"]) row.addEventListener(event, explain);
  input.addEventListener("input", () => {
    setValue(name, isSwitch ? input.checked : values[Number(input.value)]);
  });
  controls.set(name, { input, output, values });
  return row;
}

function setValue(name, value) {
  const { now, prices } = state;
  if (name in prices) state.prices = { ...prices, [name]: value };
  else if (name === "temperature") state.now = { ...now, temperature: value };
  else state.now = { ...now, settings: withValue(now.method, now.settings, name, value) };
  update();
}

function drawSliders() {
  const { method, settings, temperature } = state.now;
  for (const input of byId("methods").querySelectorAll("input")) {
    input.checked = input.value === method;
  }
  if (shownMethod !== method) buildSliders(method);
  const shown = { ...settings, ...state.prices, temperature };
  for (const [name, { input, output, values }] of controls) {
    const value = shown[name];
    const place = values.findIndex((each) => each >= value);
    if (input.type === "checkbox") input.checked = value;
    else input.value = place < 0 ? values.length - 1 : place;
    input.setAttribute("aria-valuetext", wordOf(value));
    input.style.setProperty("--at", `${(100 * Number(input.value)) / (values.length - 1)}%`);
    output.textContent = typeof value === "number" ? formatValue(Number(value.toPrecision(3))) : "";
  }
  const isNow = (name) => {
    const { row, draftPass } = pricesOf(name);
    return row === state.prices.row && draftPass === state.prices.draftPass;
  };
  byId("prices").value = Object.keys(data.prices).find(isNow) ?? "";
}
