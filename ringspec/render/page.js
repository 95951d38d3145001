"use strict";
const groups = Array.from(document.querySelectorAll("details.group"), (group) =>
  ({group, rows: Array.from(group.querySelectorAll("tbody tr")), open: group.open}));
const find = document.getElementById("find");
const only = document.getElementById("only");
const shown = document.getElementById("shown");

function filter() {
  const words = find.value.toLowerCase();
  const all = words === "" && only.value === "";
  let count = 0, total = 0;
  for (const {group, rows, open} of groups) {
    let here = 0;
    for (const row of rows) {
      const fits = row.textContent.toLowerCase().includes(words) &&
        (only.value === "" || row.dataset.outcome === only.value);
      row.hidden = !fits;
      here += fits;
    }
    group.hidden = here === 0;
    group.open = all ? open : here > 0;
    count += here;
    total += rows.length;
  }
  shown.textContent = `${count} of ${total} cases`;
}

function copy(button) {
  const done = () => { button.textContent = "Copied"; };
  const select = () => getSelection().selectAllChildren(button.previousElementSibling);
  if (!navigator.clipboard) return select();
  navigator.clipboard.writeText(button.dataset.copy).then(done, select);
}

find.addEventListener("input", filter);
only.addEventListener("input", filter);
for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", () => copy(button));
}
filter();
