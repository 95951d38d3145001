// One object, `state`, says what is shown; every control changes it and calls show(). The address of the
// page contains it too, so a link leads to a state.
const D = JSON.parse(document.getElementById("records").textContent);
const TOKENS = D.problem.tokens;
const byId = (id) => document.getElementById(id);

// The page shows rings, or (D.schemes) other ways to split attention, of whose workers it speaks as ranks.
const WHO = D.schemes ? "rank" : "worker";
const CHOICES = D.schemes ? {
  scheme: D.choices.schemes,
  mask: Object.keys(D.choices.masks),
  head: D.choices.heads,
  pass: D.choices.passes,
} : {
  w: D.choices.workers.map(String),
  layout: D.choices.layouts,
  mask: Object.keys(D.choices.masks),
  circulation: D.choices.circulations,
  pass: D.choices.passes,
};
// On the page of a known bug there are two rings to choose from.
if (D.bug) CHOICES.ring = D.choices.rings;
const state = {
  ...Object.fromEntries(Object.entries(CHOICES).map(([name, values]) => [name, values[0]])),
  step: 0, row: Math.floor((9 * TOKENS) / 16),
};
if (D.bug) Object.assign(state, D.bug.places[0]);
else if (!D.schemes) Object.assign(state, {w: CHOICES.w.includes("4") ? "4" : CHOICES.w[0], mask: "causal"});

// Make an element of HTML or SVG. Children that are not elements become text.
function make(space, tag, attributes, children) {
  const made = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}
const html = (tag, attributes = {}, ...children) =>
  make("http://www.w3.org/1999/xhtml", tag, attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  make("http://www.w3.org/2000/svg", tag, attributes, children);

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const range = (count) => Array.from({length: count}, (_, n) => n);
const colour = (worker) => worker % 8;
const spell = (name) => (name === "row_term" ? "\u03b4" : name);
const clamp = (value, most) => Math.max(0, Math.min(most, value));

// [0, 1, 2, 21, 22, 23] is written 0-2, 21-23.
function runs(tokens) {
  const parts = [];
  for (const token of tokens) {
    const last = parts[parts.length - 1];
    if (last && last[1] + 1 === token) last[1] = token;
    else parts.push([token, token]);
  }
  return parts.map(([a, b]) => (a === b ? `${a}` : a + 1 === b ? `${a}, ${b}` : `${a}\u2013${b}`)).join(", ");
}

// The records of what is chosen, or null where there is no such ring. `seen`: the pairs of a wrong ring.
function scene(ring = state.ring) {
  if (D.schemes) return schemeScene();
  const table = D.tables[`${state.w}/${state.layout}`];
  if (!table) return null;
  const wrong = ring === "wrong" ? D.wrong[state.pass] : null;
  const run = wrong ?? D.runs[`${state.w}/${state.layout}/${state.mask}/${state.circulation}`][state.pass];
  const travel = {...D.travels[`${state.w}/${state.circulation}/${state.pass}`], ...wrong};
  const owner = Array(TOKENS);
  table.forEach((tokens, worker) => tokens.forEach((token) => { owner[token] = worker; }));
  return {
    table, run, travel, owner, visible: D.visible[state.mask], seen: wrong?.seen, ring,
    steps: travel.meets.length, workers: table.length, t: state.step,
    atEnd: state.step === travel.meets.length,
  };
}

function show() {
  const now = scene();
  state.step = clamp(state.step, now ? now.steps : 0);
  if (now) Object.assign(now, {t: state.step, atEnd: state.step === now.steps});
  for (const name of Object.keys(CHOICES)) {
    for (const input of document.querySelectorAll(`input[name="${name}"]`)) {
      input.checked = input.value === state[name];
      if (!D.schemes && (name === "layout" || name === "w")) {
        const wanted = {w: state.w, layout: state.layout, [name]: input.value};
        const missing = D.missing[`${wanted.w}/${wanted.layout}`] !== undefined;
        input.parentElement.classList.toggle("missing", missing);
      }
    }
  }
  byId("row").value = state.row;
  byId("panels").hidden = byId("player").hidden = byId("say").hidden = !now;
  note(now);
  if (now) {
    showPlayer(now);
    byId("say").textContent = D.schemes ? schemeSentence(now) : sentence(now);
    if (D.schemes) showRanks(now);
    else showRing(now);
    showPattern(now);
    if (D.schemes) showCopies(now);
    else showRow(now);
    showLoad(now);
    showBytes(now);
    if (D.bug) compare(now);
  }
  remember();
}

// Say which choices do not exist, and which are the same as another.
function note(now) {
  let words = "";
  if (D.schemes) words = schemeNote(now);
  else if (!now) {
    words = `There is no such ring: ${D.missing[`${state.w}/${state.layout}`]} ` +
      "Choose another number of workers or another layout, or make the page with another --tokens.";
  } else if (state.circulation === "q" && state.pass === "forward") {
    words = "Forward, keys and values travel in this circulation too: q differs from kv only in the " +
      "backward pass.";
  } else if (now.workers === 1) {
    words = "With one worker nothing travels: this is ordinary attention.";
  }
  byId("note").textContent = words;
  byId("note").hidden = !words;
}

function showPlayer(now) {
  const slider = byId("step");
  slider.max = now.steps;
  slider.value = now.t;
  const words = now.atEnd ? "the end" : `step ${now.t} of 0\u2013${now.steps - 1}`;
  slider.setAttribute("aria-valuetext", words);
  byId("place").textContent = words;
  byId("first").disabled = byId("back").disabled = now.t === 0;
  byId("last").disabled = byId("next").disabled = now.atEnd;
}

// One or two sentences about what happens in the step.
function sentence(now) {
  const forward = state.pass === "forward";
  if (now.seen) return `${now.atEnd ? "The end" : `Step ${now.t}`} of the ring with the bug: ${D.bug.title}.`;
  if (now.atEnd) {
    const last = now.travel.sends[now.steps - 1];
    const end = forward
      ? "Every row has met every key: o is divided by l, and lse = m + log l."
      : "All gradients are complete, and each is with the owner of its tokens.";
    const home = last.length ? ` The last transfer returned ${carried(last)} to their owners.` : "";
    return `The end. ${end}${home}`;
  }
  const met = now.travel.meets[now.t];
  if (!met.some((pair) => pair.length)) {
    return `Step ${now.t}. No worker computes: each sends its keys and values to all workers.`;
  }
  const busy = now.run.pairs[now.t].map((pairs, worker) => [pairs, worker]);
  const idle = busy.filter(([pairs]) => pairs === 0).map(([, worker]) => worker);
  const what = forward
    ? `Each worker scores its queries against ${visitors(now)} and merges the result into m, l and o.`
    : `Each worker pairs its own block with ${visitors(now)} and adds the contributions to dq, dk and dv.`;
  const nothing = !idle.length ? "" : idle.length === 1
    ? ` Worker ${idle[0]} finds no visible pair and waits.`
    : ` Workers ${runs(idle)} find no visible pair and wait.`;
  return `Step ${now.t}. ${what}${nothing} ${afterwards(now)}`.trim();
}

const firstMeeting = (now) => now.travel.meets.findIndex((met) => met.some((pair) => pair.length));

function visitors(now) {
  const side = now.travel.moves === "keys" ? "keys" : "queries";
  if (now.t === firstMeeting(now)) return `its own ${side}`;
  return state.circulation === "gather" ? `the next of the gathered ${side}` : `the visiting ${side}`;
}

const carried = (transfers) =>
  transfers.map((one) => one.carries.map(spell).join(", ")).join("; ");

// Say what is sent after the step.
function afterwards(now) {
  const transfers = now.travel.sends[now.t];
  return transfers.map((one) => {
    const names = one.carries.map(spell).join(", ");
    if (one.kind === "gather") return `Then ${names} go to all workers.`;
    if (one.kind === "reduce_scatter") {
      return `Then the partial sums of ${names} go to their owners, who add them.`;
    }
    const alone = now.t === now.steps - 1 ? " one more hop, to their owners" : " to the next worker";
    return `Then ${names} ${one.carries.length === 1 ? "goes" : "go"}${alone}.`;
  }).join(" ");
}

// Write the state into the address, and read it. Invalid parts of an address are ignored.
function remember() {
  const names = [...Object.keys(CHOICES), "step", "row"];
  history.replaceState(null, "", "#" + names.map((name) => `${name}=${state[name]}`).join("&"));
}

function recall() {
  for (const part of location.hash.slice(1).split("&")) {
    const [name, value] = part.split("=");
    if (Object.hasOwn(CHOICES, name)) {
      if (CHOICES[name].includes(value)) state[name] = value;
    } else if ((name === "step" || name === "row") && /^\d{1,4}$/.test(value)) {
      state[name] = name === "row" ? clamp(Number(value), TOKENS - 1) : Number(value);
    }
  }
}

function go(step) {
  state.step = step;
  show();
}

function choose(row) {
  state.row = clamp(row, TOKENS - 1);
  show();
}

const KEYS = {
  ArrowLeft: () => go(state.step - 1),
  ArrowRight: () => go(state.step + 1),
  Home: () => go(0),
  End: () => go(Infinity),
  ArrowUp: () => choose(state.row - 1),
  ArrowDown: () => choose(state.row + 1),
};
if (D.bug) KEYS.r = exchange;

function pressed(event) {
  const own = event.target.matches("input, select"); // these use the arrow keys themselves
  if (own || event.altKey || event.ctrlKey || event.metaKey || !Object.hasOwn(KEYS, event.key)) return;
  event.preventDefault();
  KEYS[event.key]();
}

function start() {
  recall();
  byId("controls").addEventListener("change", (event) => {
    state[event.target.name] = event.target.value;
    show();
  });
  // After a mouse click the arrow keys step again; after a choice by keyboard they stay with the control.
  byId("controls").addEventListener("click", (event) => {
    if (event.detail > 0) event.target.blur();
  });
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  byId("step").addEventListener("input", (event) => go(Number(event.target.value)));
  byId("row").addEventListener("change", (event) => choose(Number(event.target.value)));
  byId("first").addEventListener("click", KEYS.Home);
  byId("back").addEventListener("click", KEYS.ArrowLeft);
  byId("next").addEventListener("click", KEYS.ArrowRight);
  byId("last").addEventListener("click", KEYS.End);
  document.addEventListener("keydown", pressed);
  addEventListener("hashchange", () => { recall(); show(); });
  show();
}
