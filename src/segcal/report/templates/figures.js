// Figures as SVG files that need no style sheet: light, with their title and the names of methods.

const INLINED = {
  fill: "rgb(0, 0, 0)", "fill-opacity": "1", stroke: "none", "stroke-width": "1px", "stroke-dasharray": "none",
  "stroke-linejoin": "miter", "shape-rendering": "auto", "font-family": "", "font-size": "", "font-weight": "400",
}; // each with what it is where a file says nothing
const EDGE = 14; // around a saved figure
const SIZES = { heading: 13, detail: 11 }; // of letters, as in the style

function inlineStyles(root) {
  for (const element of [root, ...root.querySelectorAll("*")]) {
    const style = getComputedStyle(element);
    for (const [name, usual] of Object.entries(INLINED)) {
      if (name.startsWith("font") && element.tagName !== "text") continue;
      const value = style.getPropertyValue(name);
      if (value && value !== usual) element.setAttribute(name, value);
    }
  }
  for (const element of [root, ...root.querySelectorAll("*")]) {
    for (const name of ["class", "tabindex", "aria-label", "role"]) element.removeAttribute(name);
  }
}

function wrapped(text, letters) {
  const lines = [""];
  for (const word of text.split(/\s+/).flatMap((word) => word.match(new RegExp(`.{1,${letters}}`, "gsu")) ?? [])) {
    if (lines.at(-1) && lines.at(-1).length + word.length >= letters) lines.push("");
    lines[lines.length - 1] += (lines.at(-1) ? " " : "") + word;
  }
  return lines.filter(Boolean);
}

// What a figure shows: drawings side by side, or pictures.
function contents(figure) {
  return [...figure.querySelectorAll("svg[role=img], img")].map((element) => {
    if (element.tagName === "IMG") {
      const [width, height] = [Number(element.getAttribute("width")) || element.naturalWidth, Number(element.getAttribute("height")) || element.naturalHeight];
      return { width, height, title: "", drawing: svg("image", { href: element.src, width, height }) };
    }
    const { width, height } = element.viewBox.baseVal;
    const title = element.parentElement.querySelector("b")?.textContent ?? element.getAttribute("aria-label");
    const drawing = element.cloneNode(true);
    for (const hit of drawing.querySelectorAll(".hit")) hit.remove();
    return { width, height, title, drawing: fill(drawing, { width, height, overflow: "visible" }, []) };
  });
}

// The methods that a figure's colors stand for: those of its caption, or of the key of its section.
function methodsOf(figure) {
  const own = figure.querySelectorAll("figcaption .method");
  return [...(own.length ? own : figure.closest("section, main").querySelectorAll(".key .method"))];
}

// Lines of text below one another, from a height on; and the height below them.
function written(text, kind, { x, y, width }) {
  const size = SIZES[kind];
  const lines = wrapped(text, Math.floor(width / (0.56 * size)));
  const elements = lines.map((words, i) => svg("text", { x, y: y + (i + 0.9) * 1.35 * size, class: kind, text: words }));
  return { elements, bottom: y + lines.length * 1.35 * size };
}

// The title of a figure, what its caption says, and its methods.
function heading(figure, name, width) {
  const all = [];
  let y = 0;
  const write = (text, kind, x = 0) => {
    const { elements, bottom } = written(text, kind, { x, y, width: width - x });
    all.push(...elements);
    y = bottom;
  };
  write(name, "heading");
  const detail = figure.querySelector("figcaption .fine")?.textContent ?? "";
  if (!name.includes(detail)) write(detail, "detail");
  const methods = methodsOf(figure);
  for (const tag of methods.length > 1 ? methods : []) {
    const kind = [...tag.classList].find((each) => /^m\d+$/.test(each));
    all.push(svg("g", { class: kind }, svg("circle", { cx: 4, cy: y + 9, r: 4, class: "swatch" })));
    write(tag.textContent.trim(), "detail", 14);
  }
  return { elements: all, bottom: y + 10 };
}

// One drawing of all that belongs to a figure; several drawings stand in rows, each below its own title.
function composed(figure, name) {
  const parts = contents(figure);
  const single = parts.length === 1;
  const columns = Math.ceil(Math.sqrt(parts.length));
  const wide = Math.max(...parts.map((part) => part.width)) + (single ? 0 : 2 * EDGE);
  const tall = Math.max(...parts.map((part) => part.height)) + (single ? 0 : 50);
  const width = Math.max(columns * wide, 280);
  const { elements, bottom } = heading(figure, name, width);
  const drawings = parts.flatMap(({ drawing, title }, i) => {
    const [x, y] = [(i % columns) * wide, bottom + Math.floor(i / columns) * tall];
    const above = single ? { elements: [], bottom: y } : written(title, "detail", { x, y, width: wide - EDGE });
    return [...above.elements, fill(drawing, { x, y: above.bottom + (single ? 0 : 4) }, [])];
  });
  const box = [-EDGE, -EDGE, width + 2 * EDGE, bottom + Math.ceil(parts.length / columns) * tall + 2 * EDGE];
  const sheet = svg("rect", { x: box[0], y: box[1], width: box[2], height: box[3], class: "sheet" });
  return svg("svg", { viewBox: box.join(" "), width: box[2], height: box[3] }, svg("title", { text: name }), sheet, ...elements, ...drawings);
}

function svgText(figure, name) {
  const root = composed(figure, name);
  const light = html("div", { class: "light" }, root); // styles are those of the light page, whatever is shown
  document.body.append(light);
  inlineStyles(root);
  light.remove();
  return `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(root)}\n`;
}

function saveFigure(button) {
  const figure = button.closest("figure");
  const name = nameOf(figure);
  const [picture, ...others] = figure.querySelectorAll("img");
  const ready = picture && !others.length && /^data:image\/svg\+xml;base64,(.*)$/.exec(picture.src);
  const text = ready ? Uint8Array.from(atob(ready[1]), (letter) => letter.charCodeAt(0)) : svgText(figure, name);
  download(text, "image/svg+xml", fileName(figure.dataset.name ?? name, "svg"));
  done(button, "Saved");
}

// What a figure is called: its own name, that of its drawing, or its caption.
function nameOf(figure) {
  const drawings = figure.querySelectorAll("svg[role=img]");
  const drawn = drawings.length === 1 ? drawings[0].getAttribute("aria-label") : null;
  return drawn ?? (figure.querySelector("figcaption b") ?? figure.querySelector("figcaption")).textContent.replace(/\s+/g, " ").trim();
}

function savable(figure) {
  if (figure.querySelector("svg[role=img], img")) figure.append(toolButton("Save SVG", nameOf(figure), saveFigure));
  return figure;
}

for (const figure of document.querySelectorAll("figure")) savable(figure);
