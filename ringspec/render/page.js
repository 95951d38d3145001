"use strict";
const rows = Array.from(document.querySelectorAll("#cases-table tbody tr"));
const find = document.getElementById("find");
const only = document.getElementById("only");
const shown = document.getElementById("shown");

function filter() {
  const words = find.value.toLowerCase();
  let count = 0;
  for (const row of rows) {
    const fits = row.textContent.toLowerCase().includes(words) &&
      (only.value === "" || row.dataset.outcome === only.value);
    row.hidden = !fits;
    count += fits;
  }
  shown.textContent = `${count} of ${rows.length} cases`;
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
