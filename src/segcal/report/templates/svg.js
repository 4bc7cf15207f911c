// The page's data and files; numbers, lines and the tip, of which every drawn figure is made.

const DATA = JSON.parse(document.getElementById("data").textContent);

function decoded(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

// The bytes of what lies in the page compressed, as base64.
async function unpacked(text) {
  const stream = new Blob([decoded(text)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// A table as a file.
function save(content, name) {
  const address = URL.createObjectURL(new Blob([content], { type: "text/csv;charset=utf-8" }));
  html("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

function line(x1, y1, x2, y2, kind) {
  return svg("line", { x1, y1, x2, y2, class: kind });
}

function label(text, x, y, anchor = "middle", more = {}) {
  return svg("text", { x, y, "text-anchor": anchor, text, ...more });
}

function methodTag(i) {
  const swatch = html("span", { class: "swatch", "aria-hidden": "true" });
  return html("span", { class: `method m${i}` }, swatch, DATA.methods[i]);
}

function number(value, digits = 3) {
  return value === null || value === undefined ? "–" : value.toFixed(digits).replace("-", "−");
}

function percent(value) {
  return value === null ? "–" : `${(100 * value).toFixed(1)} %`;
}

const whole = new Intl.NumberFormat("en");

function range(i, parts) {
  return `${number(i / parts, 2)} to ${number((i + 1) / parts, 2)}`;
}

const tip = document.getElementById("tip");

function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.max(8, Math.min(x + 14, innerWidth - box.width - 8));
  const top = y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18;
  tip.style.left = `${left}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}

function hideTip() {
  tip.hidden = true;
}

// Tips on the targets of a figure: under the pointer, and with the arrow keys once the figure has the focus.
function explain(figure, targets) {
  let at = -1;
  const choose = (next) => {
    targets[at]?.element.classList.remove("on");
    at = next;
    targets[at]?.element.classList.add("on");
  };
  for (const { element, text } of targets) {
    element.addEventListener("pointermove", (event) => showTip(text, event.clientX, event.clientY));
    element.addEventListener("pointerleave", hideTip);
  }
  figure.setAttribute("tabindex", "0");
  figure.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") hideTip();
    if (!step || !targets.length) return;
    event.preventDefault();
    choose(at < 0 && step < 0 ? targets.length - 1 : Math.max(0, Math.min(targets.length - 1, at + step)));
    const box = targets[at].element.getBoundingClientRect();
    showTip(targets[at].text, box.left + box.width / 2, box.top + box.height / 2);
  });
  figure.addEventListener("blur", () => {
    choose(-1);
    hideTip();
  });
}
