// The text in blocks, one for each iteration: the accepted tokens and the bonus token.

function drawText(place, { iterations }) {
  const prompt = html("span", { class: "prompt" }, data.prompt.text);
  const first = tokenSpan(data.pieces[0], { token: true, bonus: true }); // of the pass over it
  place.replaceChildren(prompt, first, ...iterations.flatMap(blockOf));
}

// A block, and before it the space with which it begins, so that no line ends with a mark of it.
function blockOf({ start, path, tree }) {
  const space = data.pieces[start + 1].match(/^ (?=.)/)?.[0] ?? "";
  const tokens = path.map((_, i) => {
    const isBonus = i === path.length - 1;
    const piece = data.pieces[start + 1 + i].slice(i ? 0 : space.length);
    return tokenSpan(piece, { drafted: !isBonus, bonus: isBonus });
  });
  const flags = { block: true, token: true, incomplete: tree.isIncomplete };
  return [space, html("span", { class: classes(flags), "data-start": start }, ...tokens)];
}

// Frame an iteration's block, and scroll the text, but not the page, to it.
function frameBlock(place, { start }) {
  for (const block of place.querySelectorAll(".block")) {
    block.classList.toggle("selected", Number(block.dataset.start) === start);
  }
  const { offsetTop: top, offsetHeight: height } = place.querySelector(".selected");
  const bottom = top + height - place.clientHeight;
  place.scrollTop = clamp(place.scrollTop, bottom + 4, Math.max(top - 4, bottom + 4));
}
