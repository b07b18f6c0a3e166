// Updates the part of a page that the server sends again after each change: <div data-live="/address">.
// Without this script the page shows the state at the moment when it was loaded.
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
