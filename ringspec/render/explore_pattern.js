// The pattern: queries down, keys across; a cell for each pair that the mask lets through.
const CELL = 16;
const EDGE = 36;

// [step, worker] for every visible pair, by row and column.
function computed(now) {
  const cells = range(TOKENS).map(() => Array(TOKENS).fill(null));
  now.travel.meets.forEach((met, t) => met.forEach((pair, worker) => {
    if (!pair.length) return;
    for (const i of now.table[pair[0]]) {
      for (const j of now.table[pair[1]]) {
        if (now.visible[i][j] === "1") cells[i][j] = [t, worker];
      }
    }
  }));
  return cells;
}

function showPattern(now) {
  const size = EDGE + TOKENS * CELL + 3;
  const drawn = [];
  const count = {now: 0, past: 0, later: 0, never: 0};
  computed(now).forEach((row, i) => row.forEach((cell, j) => {
    const kind = !cell ? "never" : cell[0] === now.t ? "now" : cell[0] < now.t ? "past" : "later";
    count[kind] += 1;
    drawn.push(...cellOf(kind, i, j, cell));
  }));
  const most = TOKENS * CELL;
  const picture = svg("svg", {viewBox: `0 0 ${size} ${size}`, role: "img"},
    svg("rect", {class: "grid", x: EDGE, y: EDGE, width: most, height: most}),
    ...drawn, ...strips(now),
    svg("text", {class: "small", x: EDGE + most / 2, y: 10, "text-anchor": "middle"}, "keys, by owner"),
    svg("text", {class: "small", transform: `translate(10 ${EDGE + most / 2}) rotate(-90)`,
      "text-anchor": "middle"}, "queries, by owner"),
    svg("rect", {class: "chosen", x: 15, y: EDGE + state.row * CELL, width: size - 17, height: CELL}));
  picture.setAttribute("aria-label",
    `${TOKENS} queries by ${TOKENS} keys: ${count.now} pairs in this step, ${count.past} in earlier ` +
    `ones, ${count.later} still to come, ${count.never} masked. Row ${state.row} is chosen.`);
  picture.addEventListener("click", (event) => {
    const box = picture.getBoundingClientRect();
    choose(Math.floor((((event.clientY - box.top) / box.height) * size - EDGE) / CELL));
  });
  byId("pattern").replaceChildren(picture);
  const words = {
    now: "this step, with the number of the worker", past: "earlier", later: "still to come",
    never: "masked",
  };
  byId("pattern-key").replaceChildren(...Object.entries(words).map(([kind, meaning]) =>
    html("li", {}, html("span", {class: `sample ${kind}`, "aria-hidden": "true"}),
      html("b", {id: `pairs-${kind}`}, count[kind]), ` ${meaning}`)));
}

function cellOf(kind, i, j, cell) {
  const [x, y] = [EDGE + j * CELL, EDGE + i * CELL];
  if (kind === "never") return [];
  if (kind === "later") {
    return [svg("circle", {class: "cell-later", cx: x + CELL / 2, cy: y + CELL / 2, r: 2.2})];
  }
  const own = colour(cell[1]);
  const look = {x: x + 0.5, y: y + 0.5, width: CELL - 1, height: CELL - 1};
  if (kind === "past") return [svg("rect", {class: `cell past own w${own}`, ...look})];
  return [
    svg("rect", {class: `cell now own w${own}`, "data-pair": `${i},${j},${cell[1]}`, ...look}),
    svg("text", {class: `digit on w${own}`, x: x + CELL / 2, y: y + 12}, cell[1]),
  ];
}

// Who owns each query and each key, along the edges.
function strips(now) {
  return range(TOKENS).flatMap((token) => {
    const [owner, place] = [now.owner[token], EDGE + token * CELL];
    const own = `cell own w${colour(owner)}`;
    const digit = `digit on w${colour(owner)}`;
    return [
      svg("rect", {class: own, x: place, y: 16, width: CELL, height: CELL}),
      svg("text", {class: digit, x: place + CELL / 2, y: 28}, owner),
      svg("rect", {class: own, x: 16, y: place, width: CELL, height: CELL}),
      svg("text", {class: digit, x: 16 + CELL / 2, y: place + 12}, owner),
    ];
  });
}
