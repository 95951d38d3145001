"use strict";
// Adds the filters. Without this script the table is complete.
const words = document.getElementById("words");
const feature = document.getElementById("feature");
const verdict = document.getElementById("verdict");
const rows = Array.from(document.querySelectorAll("#matrix tbody tr"), (row) =>
  ({row, text: row.textContent.toLowerCase(), verdicts: row.dataset.verdicts.split("|")}));
const groups = document.querySelectorAll("#matrix th.group");

function fits({row, text, verdicts}) {
  if (!words.value.toLowerCase().split(/\s+/).every((word) => text.includes(word))) return false;
  if (verdict.value === "") return true;
  if (feature.value === "") return verdicts.includes(verdict.value);
  const cell = Array.from(row.cells).find((one) => one.dataset.column === feature.value);
  return cell.dataset.verdict === verdict.value;
}

function filter() {
  let count = 0;
  for (const one of rows) {
    one.row.hidden = !fits(one);
    count += !one.row.hidden;
  }
  for (const cell of document.querySelectorAll("#matrix [data-column]")) {
    cell.hidden = feature.value !== "" && cell.dataset.column !== feature.value;
  }
  for (const group of groups) group.hidden = feature.value !== "";
  document.getElementById("shown").textContent = `${count} of ${rows.length} rows`;
}

const form = document.getElementById("filter");
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", filter);
form.hidden = false;
filter();
