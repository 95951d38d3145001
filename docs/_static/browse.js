// Filters the rows of every table.browse on a page that has a div.browse-filter, opens all folds at a click in a
// div.open-all, and opens what an address names. Without scripts the tables are complete and the folds work.
"use strict";

const box = document.querySelector(".browse-filter");
const tables = [...document.querySelectorAll("table.browse, details.browse table")];
const rows = tables.flatMap((table) => [...table.tBodies[0].rows]);
const folds = [...document.querySelectorAll("article details")];

// The group that opens on a click (cases), or the section (rules), of a table.
const groupOf = (table) => table.closest("details") || table.closest("section");

function show(words) {
  let found = 0;
  for (const table of tables) {
    let here = 0;
    for (const row of table.tBodies[0].rows) {
      const fits = words.every((word) => row.text.includes(word));
      row.hidden = !fits;
      here += fits;
    }
    const group = groupOf(table);
    group.hidden = here === 0;
    if (group.tagName === "DETAILS") group.open = words.length > 0 && here > 0;
    found += here;
  }
  return found;
}

// The folds in the row or the section that a target begins. Several in one section are a list, which stays closed.
function foldsOf(target) {
  const row = target.closest("table.browse tr");
  if (row) return row.querySelectorAll("details");
  const inside = target.closest("section")?.querySelectorAll(":scope > details") ?? [];
  return inside.length === 1 ? inside : [];
}

// Opens everything around and in what the address names.
function reveal() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let above = target.closest("details"); above; above = above.parentElement.closest("details")) above.open = true;
  for (const one of foldsOf(target)) one.open = true;
  (target.closest("table.browse tr") ?? target).scrollIntoView();
}

for (const place of document.querySelectorAll(".open-all")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Open all";
  button.addEventListener("click", () => {
    const open = folds.some((one) => !one.open);
    for (const one of folds) one.open = open;
    button.textContent = open ? "Close all" : "Open all";
  });
  place.append(button);
}

if (box) {
  for (const row of rows) row.text = row.textContent.toLowerCase();
  const field = document.createElement("input");
  field.type = "search";
  field.placeholder = `Filter by ${box.dataset.what}`;
  field.setAttribute("aria-label", field.placeholder);
  const count = document.createElement("span");
  count.setAttribute("role", "status");
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    count.textContent = `${show(words)} of ${rows.length} rows`;
  });
  box.append(field, count);
}
if (box || folds.length) {
  reveal();
  window.addEventListener("hashchange", reveal);
}
