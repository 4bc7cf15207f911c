// Figures as SVG files that need no style sheet: light, with their title and the names of methods.

const INLINED = {
  fill: "rgb(0, 0, 0)", "fill-opacity": "1", stroke: "none", "stroke-width": "1px", "stroke-dasharray": "none",
  "stroke-linejoin": "miter", "shape-rendering": "auto", "font-family": "", "font-size": "", "font-weight": "400",
}; // each with what it is where a file says nothing
const EDGE = 14; // around a saved figure

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
    const drawing = element.cloneNode(true);
    for (const hit of drawing.querySelectorAll(".hit")) hit.remove();
    return { width, height, title: element.getAttribute("aria-label"), drawing: fill(drawing, { width, height, overflow: "visible" }, []) };
  });
}

// The methods that a figure's colors stand for: those of its caption, or of the key of its section.
function methodsOf(figure) {
  const own = figure.querySelectorAll("figcaption .method");
  return [...(own.length ? own : figure.closest("section, main").querySelectorAll(".key .method"))];
}

// One drawing of all that belongs to a figure. Its lines of text come first, and need their height.
function composed(figure, name) {
  const parts = contents(figure);
  const columns = Math.ceil(Math.sqrt(parts.length));
  const [wide, tall] = [Math.max(...parts.map(({ width }) => width)), Math.max(...parts.map(({ height }) => height))];
  const single = parts.length === 1;
  const width = Math.max(columns * (wide + EDGE) - EDGE, 280);
  const root = svg("svg", { xmlns: SVG });
  let y = 0;
  const write = (text, size, kind, x = 0) => {
    for (const words of wrapped(text, Math.floor((width - x) / (0.56 * size)))) {
      y += size * 1.35;
      root.append(svg("text", { x, y, class: kind, text: words }));
    }
  };
  write(name, 13, "heading");
  write(figure.querySelector("figcaption .fine")?.textContent ?? "", 11, "detail");
  const methods = methodsOf(figure);
  for (const tag of methods.length > 1 ? methods : []) {
    const kind = [...tag.classList].find((each) => /^m\d+$/.test(each));
    root.append(svg("g", { class: kind }, svg("circle", { cx: 4, cy: y + 11, r: 4, class: "swatch" })));
    write(tag.textContent.trim(), 11, "detail", 14);
  }
  y += 10;
  parts.forEach(({ drawing, title }, i) => {
    const [left, top] = [(i % columns) * (wide + EDGE), y + Math.floor(i / columns) * (tall + (single ? 0 : 30))];
    if (!single) root.append(svg("text", { x: left, y: top + 14, class: "detail", text: title }));
    root.append(fill(drawing, { x: left, y: top + (single ? 0 : 20) }, []));
  });
  const height = y + Math.ceil(parts.length / columns) * (tall + (single ? 0 : 30));
  const box = [-EDGE, -EDGE / 2, width + 2 * EDGE, height + 1.5 * EDGE];
  root.prepend(svg("title", { text: name }), svg("rect", { x: box[0], y: box[1], width: box[2], height: box[3], class: "sheet" }));
  return fill(root, { viewBox: box.join(" "), width: box[2], height: box[3] }, []);
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
