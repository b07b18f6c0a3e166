// Updates the part of a page that the server sends again after each change (<div data-live="/address">), loads parts
// whose sums take a while (<div id="name" data-later="/address">), and sorts tables by the columns that a user selects.
// Without this script the page shows the state at the moment when it was loaded, and links to such parts.
"use strict";

const region = document.querySelector("[data-live]");
const stateText = document.querySelector("[data-live-state]");
let source = null;

function setStatus(text) {
  if (stateText) stateText.textContent = text;
}

// True if the user has selected text in the region. It is then not updated, because an update would clear the selection.
function isMarked() {
  const selection = document.getSelection();
  return selection && !selection.isCollapsed && region.contains(selection.anchorNode);
}

function renew(html) {
  if (isMarked()) return;
  const focused = region.contains(document.activeElement) ? document.activeElement : null;
  const target = focused && [focused.id, focused.getAttribute("href"), focused.getAttribute("aria-label")];
  const open = new Set([...region.querySelectorAll("details[open][id]")].map((one) => one.id));
  const scrolled = [...region.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  // The server escapes untrusted text, and its content policy forbids scripts in this HTML.
  region.innerHTML = html;
  region.querySelectorAll("table").forEach(makeSortable);
  region.querySelectorAll("details[id]").forEach((one) => { if (open.has(one.id)) one.open = true; });
  region.querySelectorAll(".scroll").forEach((one, at) => { one.scrollLeft = scrolled[at] || 0; });
  // The focus moves to the same element in the new HTML.
  if (!target) return;
  const [id, href, label] = target;
  const same = [...region.querySelectorAll("a, button, summary, [tabindex]")].find(
    (one) => (id && one.id === id) || (href && one.getAttribute("href") === href) ||
      (label && one.getAttribute("aria-label") === label));
  if (same) same.focus({ preventScroll: true });
}

function open() {
  if (source) return;
  source = new EventSource(region.dataset.live);
  source.addEventListener("open", () => setStatus("live"));
  source.addEventListener("html", (event) => renew(event.data));
  source.addEventListener("over", () => { close("no longer live"); location.reload(); });
  source.addEventListener("error", () => {
    setStatus(source.readyState === EventSource.CLOSED ? "not live: load the page again" : "not live: connecting again");
  });
}

function close(text) {
  if (source) source.close();
  source = null;
  setStatus(text);
}

if (region && window.EventSource) {
  // A hidden page closes its stream.
  document.addEventListener("visibilitychange", () => (document.hidden ? close("paused") : open()));
  addEventListener("pagehide", () => close("paused"));
  addEventListener("pageshow", () => { if (!document.hidden) open(); });
}

// The selected column and direction (1 upwards, -1 downwards) of each table, by the table's name.
const sorted = new Map();
const UNITS = { s: 1, min: 60, h: 3600, d: 86400, B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30 };
const NUMBER = /^[+-]?\d[\d.]*(e[+-]?\d+)?(?=x|×|%|\s|\+|$)/i;

// The number by which a cell is sorted: a moment, a duration or size with units, or the number at its beginning.
function numberOf(cell) {
  const time = cell.querySelector("time");
  if (time) return Date.parse(time.dateTime);
  const text = cell.textContent.trim().replace(/\u2009/g, "");
  if (!NUMBER.test(text)) return NaN;
  const parts = [...text.matchAll(/([\d.]+) (s|min|h|d|B|KiB|MiB|GiB)\b/g)];
  return parts.length ? parts.reduce((sum, part) => sum + part[1] * UNITS[part[2]], 0) : parseFloat(text);
}

// Sorts rows by a column. Rows with an empty cell come last.
function sortRows(rows, column, direction) {
  const keys = new Map(rows.map((row) => [row, [row.cells[column].textContent.trim(), numberOf(row.cells[column])]]));
  const areNumbers = [...keys.values()].every(([text, number]) => !text || !isNaN(number));
  const compare = ([a, m], [b, n]) => (areNumbers ? m - n : a.localeCompare(b, undefined, { numeric: true }));
  return rows.slice().sort((one, other) => {
    const [a, b] = [keys.get(one), keys.get(other)];
    return a[0] && b[0] ? direction * compare(a, b) : (a[0] ? -1 : b[0] ? 1 : 0);
  });
}

function makeSortable(table, index) {
  const rows = [...table.tBodies[0].rows];
  const heads = [...table.tHead.rows[0].cells];
  if (rows.length < 3 || rows.some((row) => row.cells.length !== heads.length)) return;
  const name = table.caption.textContent;

  function show() {
    const [column, direction] = sorted.get(name) || [];
    table.tBodies[0].append(...(direction ? sortRows(rows, column, direction) : rows));
    heads.forEach((head, at) => {
      if (at === column && direction) head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
  }

  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.className = "sort";
    button.id = `sort-${index}-${column}`;
    button.title = "Sort these rows";
    button.append(...head.childNodes);
    head.append(button);
    // Numbers and moments begin downwards, and texts upwards. The third click restores the order of the server.
    button.addEventListener("click", () => {
      const [at, direction] = sorted.get(name) || [];
      const first = rows.some((row) => !isNaN(numberOf(row.cells[column]))) ? -1 : 1;
      sorted.set(name, [column, at !== column || !direction ? first : direction === first ? -first : 0]);
      show();
    });
  });
  if (sorted.has(name)) show();
}

document.querySelectorAll("table").forEach(makeSortable);

document.querySelectorAll("[data-later]").forEach(async (part) => {
  try {
    const answer = await fetch(part.dataset.later);
    const loaded = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById(part.id);
    if (!answer.ok || !loaded) throw new Error(answer.statusText);
    part.replaceWith(loaded);
    loaded.querySelectorAll("table").forEach(makeSortable);
  } catch {
    part.firstElementChild.prepend("It could not be loaded. ");
  }
});
