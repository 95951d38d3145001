// Filters the rows of every table.browse on a page that has a div.browse-filter. Without scripts the tables are complete.
"use strict";

const box = document.querySelector(".browse-filter");
const tables = [...document.querySelectorAll("table.browse")];
const rows = tables.flatMap((table) => [...table.tBodies[0].rows]);

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

// Opens everything around and in the row that the address names.
function reveal() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const row = target && target.closest("table.browse tr");
  if (!row) return;
  for (let above = row.closest("details"); above; above = above.parentElement.closest("details")) above.open = true;
  for (const one of row.querySelectorAll("details")) one.open = true;
  row.scrollIntoView();
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
  reveal();
  window.addEventListener("hashchange", reveal);
}
