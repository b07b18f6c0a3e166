// Renews the part of a page that the server sends again when it changes: <div data-live="/address">.
// Without this script the page shows what was so when it was loaded.
"use strict";

const region = document.querySelector("[data-live]");
const told = document.querySelector("[data-live-state]");
let source = null;

function say(words) {
  if (told) told.textContent = words;
}

// A person who marks text, or is at a link in the region, is not disturbed.
function isMarked() {
  const selection = document.getSelection();
  return selection && !selection.isCollapsed && region.contains(selection.anchorNode);
}

function renew(html) {
  if (isMarked()) return;
  const focused = region.contains(document.activeElement) ? document.activeElement : null;
  const place = focused && [focused.id, focused.getAttribute("href"), focused.getAttribute("aria-label")];
  const open = new Set([...region.querySelectorAll("details[open][id]")].map((one) => one.id));
  const scrolled = [...region.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  // The server escapes what others wrote, and its policy lets no script in here run.
  region.innerHTML = html;
  region.querySelectorAll("details[id]").forEach((one) => { if (open.has(one.id)) one.open = true; });
  region.querySelectorAll(".scroll").forEach((one, at) => { one.scrollLeft = scrolled[at] || 0; });
  if (!place) return;
  const [id, href, label] = place;
  const same = [...region.querySelectorAll("a, button, summary, [tabindex]")].find(
    (one) => (id && one.id === id) || (href && one.getAttribute("href") === href) ||
      (label && one.getAttribute("aria-label") === label));
  if (same) same.focus({ preventScroll: true });
}

function open() {
  if (source) return;
  source = new EventSource(region.dataset.live);
  source.addEventListener("open", () => say("live"));
  source.addEventListener("html", (event) => renew(event.data));
  source.addEventListener("over", () => { close("no longer live"); location.reload(); });
  source.addEventListener("error", () => {
    say(source.readyState === EventSource.CLOSED ? "not live: load the page again" : "not live: connecting again");
  });
}

function close(words) {
  if (source) source.close();
  source = null;
  say(words);
}

if (region && window.EventSource) {
  // A page that nobody sees asks for nothing.
  document.addEventListener("visibilitychange", () => (document.hidden ? close("paused") : open()));
  addEventListener("pagehide", () => close("paused"));
  addEventListener("pageshow", () => { if (!document.hidden) open(); });
}
