// The ring: a box for each worker, clockwise; in it chips for the blocks that it holds. A chip keeps
// its element from step to step, so that one can see it move.
const BOX = {width: 190, height: 102, across: 34, down: 34};
const SUMS = {forward: ["m", "l", "o", "lse"], backward: ["dq", "dk", "dv"]};
const QUERY_NAMES = ["q", "dy", "lse", "row_term", "dq", "m", "l", "o"];
const chips = {key: "", made: new Map(), layer: null};

// Corners [x, y] of the boxes on a grid of two columns, clockwise in the order of the ring.
function places(workers) {
  const columns = Math.min(workers, 2);
  const rows = Math.ceil(workers / columns);
  const cells = [];
  for (let x = 0; x < columns; x++) cells.push([x, 0]);
  for (let y = 1; y < rows - 1; y++) cells.push([columns - 1, y]);
  const below = rows > 1 ? Math.min(columns, workers - cells.length - Math.max(0, rows - 2)) : 0;
  const left = (columns - below) / 2;
  for (let x = below - 1; x >= 0; x--) cells.push([left + x, rows - 1]);
  for (let y = rows - 2; y > 0; y--) cells.push([0, y]);
  return cells.map(([x, y]) => [
    4 + x * (BOX.width + BOX.across), 4 + y * (BOX.height + BOX.down)]);
}

function showRing(now) {
  const at = places(now.workers);
  const width = Math.max(...at.map(([x]) => x)) + BOX.width + 4;
  const height = Math.max(...at.map(([, y]) => y)) + BOX.height + 4;
  const key = [state.w, state.layout, state.mask, state.circulation, state.pass, state.ring].join();
  if (chips.key !== key) Object.assign(chips, {key, made: new Map(), layer: svg("g")});
  const still = svg("g", {}, ...arrows(now, at), ...boxes(now, at));
  placeChips(now, at);
  let picture = byId("ring").firstElementChild;
  if (!picture || picture.lastElementChild !== chips.layer) {
    picture = svg("svg", {role: "img"}, still, chips.layer);
    byId("ring").replaceChildren(picture);
  } else {
    picture.firstElementChild.replaceWith(still);
  }
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  picture.style.maxWidth = `${1.7 * width}px`;
  picture.setAttribute("aria-label", holdings(now));
  const sent = now.atEnd || now.seen ? [0] : now.run.sent[now.t];
  byId("travel").textContent = now.seen ? "The blocks are the inputs of the computation. Bytes are not counted."
    : now.atEnd ? "The last transfer has arrived." : sum(sent)
    ? `After this step each worker sends ${sent[0]} bytes, all together ${sum(sent)}.`
    : "After this step nothing is sent.";
  if (now.workers > 1 && travelling(now, 0).length > 2) {
    byId("travel").textContent +=
      " Small circles are gathered copies, by owner; a dark ring marks the one in use.";
  }
}

const busyPairs = (now, worker) => (now.atEnd ? 0 : now.run.pairs[now.t][worker]);

function boxes(now, at) {
  return at.flatMap(([x, y], worker) => {
    const pairs = busyPairs(now, worker);
    const computes = !now.atEnd && now.travel.meets[now.t][worker].length > 0;
    const words = !computes ? "" : pairs ? `${pairs} pair${pairs === 1 ? "" : "s"}` : "idle";
    const look = `box own w${colour(worker)}${computes && !pairs ? " idle" : ""}`;
    const gathered = travelling(now, worker).length > 2 ? ["k v", "dk dv"] : [];
    if (state.pass === "forward" || now.atEnd) gathered.pop();
    return [
      svg("rect", {class: look, x, y, width: BOX.width, height: BOX.height, rx: 8}),
      svg("text", {class: "name", x: x + 9, y: y + 18}, `worker ${worker}`),
      svg("text", {class: "pairs", x: x + BOX.width - 9, y: y + 18}, words),
      ...gathered.map((name, n) => svg("text", {class: "small", x: x + 9, y: y + 69 + 22 * n}, name)),
    ];
  });
}

// An arrow for each pair of the permute, heavy where something is sent after this step.
function arrows(now, at) {
  const sends = now.atEnd ? [] : now.travel.sends[now.t];
  const ring = [...sends, ...now.travel.sends.flat()].find((one) => one.kind === "permute");
  const centre = ([x, y]) => [x + BOX.width / 2, y + BOX.height / 2];
  if (!ring) {
    if (!sends.length) return [];
    return at.flatMap((one, a) => at.slice(a + 1).map((other) => {
      const [[x1, y1], [x2, y2]] = [centre(one), centre(other)];
      return svg("line", {class: "arrow busy", x1, y1, x2, y2});
    }));
  }
  const busy = sends.length ? " busy" : "";
  return ring.pairs.flatMap(([source, target]) => {
    const back = ring.pairs.some(([a, b]) => a === target && b === source);
    return arrow(centre(at[source]), centre(at[target]), busy, back ? 12 : 0);
  });
}

// From the edge of one box to the edge of another; `aside` keeps two opposite arrows apart.
function arrow([x1, y1], [x2, y2], busy, aside) {
  const [dx, dy] = [x2 - x1, y2 - y1];
  const length = Math.hypot(dx, dy);
  const [ux, uy] = [dx / length, dy / length];
  const edge = Math.min(
    ux ? BOX.width / 2 / Math.abs(ux) : Infinity, uy ? BOX.height / 2 / Math.abs(uy) : Infinity);
  const shift = ([x, y]) => [x - uy * aside, y + ux * aside];
  const from = shift([x1 + ux * (edge + 2), y1 + uy * (edge + 2)]);
  const tip = shift([x2 - ux * (edge + 2), y2 - uy * (edge + 2)]);
  const foot = [tip[0] - ux * 9, tip[1] - uy * 9];
  const corner = (side) => `${foot[0] - uy * 6 * side},${foot[1] + ux * 6 * side}`;
  return [
    svg("line", {class: `arrow${busy}`, x1: from[0], y1: from[1], x2: foot[0], y2: foot[1]}),
    svg("polygon", {class: `head${busy}`, points: `${tip} ${corner(1)} ${corner(-1)}`}),
  ];
}

// Whether a block belongs to the side that travels; with one worker nothing travels.
function travels(now, names) {
  const ofQueries = QUERY_NAMES.includes(names[0]);
  return ofQueries === (now.travel.moves === "queries");
}

const travelling = (now, worker) =>
  now.travel.stops[now.t][worker].filter(([, ...names]) => travels(now, names));

function placeChips(now, at) {
  const used = new Set();
  now.travel.stops[now.t].forEach((blocks, worker) => {
    const many = travelling(now, worker).length > 2;
    const next = {stays: 9, travels: 9, inputs: 46, sums: 46};
    for (const [owner, ...names] of blocks) {
      const moves = travels(now, names);
      const sums = names.filter((name) => SUMS[state.pass].includes(name));
      const inputs = names.filter((name) => !SUMS[state.pass].includes(name));
      for (const [kind, list] of [["input", inputs], ["sum", sums]]) {
        if (!list.length) continue;
        const small = many && moves;
        const row = small ? (kind === "input" ? "inputs" : "sums") : moves ? "travels" : "stays";
        // Copies of a block exist where keys are gathered, and in a wrong ring.
        const copies = state.circulation === "gather" || now.seen;
        const id = `${moves}/${kind}/${owner}` + (copies ? `@${worker}` : "");
        const chip = chipOf(id, owner, kind, moves && now.workers > 1);
        const wide = dress(chip, owner, small ? [] : list);
        const lower = {stays: 27, travels: 65, inputs: 56, sums: 78}[row];
        const [x, y] = at[worker];
        chip.style.transform = `translate(${x + next[row]}px, ${y + lower}px)`;
        next[row] += wide + (small ? 1 : 5);
        const met = now.atEnd ? [] : now.travel.meets[now.t][worker];
        chip.classList.toggle("used", small && met[1] === owner);
        chip.classList.toggle("unused", small && met[1] !== owner);
        Object.assign(chip.dataset, {worker, owner, names: list.join(" ")});
        used.add(id);
      }
    }
  });
  for (const [id, chip] of chips.made) {
    if (!used.has(id)) {
      chip.remove();
      chips.made.delete(id);
    }
  }
}

function chipOf(id, owner, kind, moves) {
  if (!chips.made.has(id)) {
    const chip = svg("g", {class: `chip ${kind}${moves ? " travels" : ""}`, "data-chip": id},
      svg("rect", {class: `own w${colour(owner)}`, height: 24, rx: moves ? 11 : 3}), svg("text", {y: 16.5}));
    chips.made.set(id, chip);
    chips.layer.append(chip);
  }
  return chips.made.get(id);
}

// The words of a chip and, from them, its width.
function dress(chip, owner, names) {
  const [rect, text] = chip.children;
  const words = names.length ? names.map((name) => spell(name) + subscript(owner)).join(" ") : `${owner}`;
  const small = !names.length;
  const wide = small ? 16 : 14 + 7.2 * words.length - (words.length > 9 ? 9 : 0);
  rect.setAttribute("width", wide);
  rect.setAttribute("height", small ? 18 : 24);
  text.setAttribute("x", wide / 2);
  text.setAttribute("y", small ? 13 : 16.5);
  text.setAttribute("text-anchor", "middle");
  text.setAttribute("class", `on w${colour(owner)}`);
  text.textContent = words;
  return wide;
}

const subscript = (owner) =>
  [...String(owner)].map((digit) => String.fromCharCode(0x2080 + Number(digit))).join("");

// The same in words, for a reader who does not see the picture.
function holdings(now) {
  const blocks = now.travel.stops[now.t].map((held, worker) => {
    const words = held.map(([owner, ...names]) => `${names.map(spell).join(" ")} of worker ${owner}`);
    return `Worker ${worker} holds ${words.join("; ")}.`;
  });
  return blocks.join(" ");
}
