// The figures. All numbers come from Python; here they only get a place.

const TICKS = [0, 0.25, 0.5, 0.75, 1];

// The unit square of confidence and frequency, with its ideal line.
function unitSquare({ left, top, size, plain = false, ticks = TICKS }) {
  const x = (value) => left + value * size;
  const y = (value) => top + (1 - value) * size;
  const group = svg("g");
  for (const tick of plain ? [0, 1] : ticks) {
    group.append(line(x(0), y(tick), x(1), y(tick), "grid"), line(x(tick), y(0), x(tick), y(1), "grid"));
    if (!plain) group.append(label(tick, left - 7, y(tick) + 4, "end"));
  }
  group.append(line(x(0), y(0), x(1), y(1), "ideal"));
  return { group, x, y };
}

function path(points, kind) {
  return svg("path", { d: points.map(([a, b], i) => `${i ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join(""), class: kind });
}

function drawing(width, height, title, method = null) {
  const kind = method === null ? null : `m${method}`;
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title, class: kind });
}

function countBars(root, rows, { left, top, width, height }) {
  const most = Math.max(1, ...rows.map((row) => Math.log10(row[1] + 1)));
  const step = Math.max(1, Math.ceil(most / 3));
  for (let power = 0; power <= most; power += step) {
    const y = top + height * (1 - power / most);
    root.append(line(left, y, left + width, y, "grid"));
    root.append(label(`10${"⁰¹²³⁴⁵⁶⁷⁸⁹"[power] ?? power}`, left - 7, y + 4, "end"));
  }
  for (const [bin, count] of rows) {
    const tall = Math.max(1, (height * Math.log10(count + 1)) / most);
    const x = left + (bin * width) / DATA.bins;
    root.append(svg("rect", { x: x + 0.75, y: top + height - tall, width: Math.max(0.5, width / DATA.bins - 1.5), height: tall, class: "bar" }));
  }
}

function binText([bin, count, confidence, frequency, low, high]) {
  const gap = 100 * (confidence - frequency);
  return [
    `Bin ${range(bin, DATA.bins)}`,
    `Confidence ${percent(confidence)}`,
    `Frequency ${percent(frequency)}${low === null ? "" : `, band ${percent(low)} to ${percent(high)}`}`,
    `Gap ${Math.abs(gap).toFixed(1)} points${Math.abs(gap) < 0.05 ? "" : gap > 0 ? ", too high" : ", too low"}`,
    `${whole.format(count)} ${count === 1 ? "voxel" : "voxels"}`,
  ].join("\n");
}

// rows: (bin, count, confidence, frequency, low, high) of each bin that holds anything.
function reliabilityChart(rows, method, title, ticks = TICKS) {
  const frame = { left: 44, top: 8, size: 280, ticks };
  const bars = { left: 44, top: 318, width: 280, height: 54 };
  const root = drawing(336, 416, title, method);
  const { group, x, y } = unitSquare(frame);
  root.append(group);
  const wide = frame.size / DATA.bins;
  for (const [bin, , , , low, high] of rows) {
    if (low !== null) root.append(svg("rect", { x: x(bin / DATA.bins), y: y(high), width: wide, height: Math.max(0.5, y(low) - y(high)), class: "band" }));
  }
  const points = rows.map((row) => [x(row[2]), y(row[3])]);
  root.append(path(points, "trace"), ...points.map(([cx, cy]) => svg("circle", { cx, cy, r: 3.6, class: "dot" })));
  countBars(root, rows, bars);
  root.append(line(x(0), bars.top + bars.height, x(1), bars.top + bars.height, "axis"));
  for (const tick of ticks) root.append(label(tick, x(tick), 388));
  root.append(label("confidence", x(0.5), 408), label("frequency", 0, 0, "middle", { transform: `translate(6 ${y(0.5)}) rotate(-90)` }));
  root.append(label("count", 0, 0, "middle", { transform: `translate(6 ${bars.top + bars.height / 2}) rotate(-90)` }));
  const targets = rows.map((row) => {
    const element = svg("rect", { x: x(row[0] / DATA.bins), y: frame.top, width: wide, height: bars.top + bars.height - frame.top, class: "hit" });
    return { element, text: binText(row) };
  });
  root.append(...targets.map((target) => target.element));
  explain(root, targets);
  return root;
}

// All methods in one small square, to scan many classes.
function glanceChart(records, title) {
  const root = drawing(120, 120, title);
  const { group, x, y } = unitSquare({ left: 2, top: 2, size: 116, plain: true });
  root.append(group);
  records.forEach(({ rows }, method) => {
    const trace = path(rows.map((row) => [x(row[2]), y(row[3])]), "trace");
    root.append(svg("g", { class: `m${method}` }, trace));
  });
  return root;
}

const shade = (share) => share ** 0.35; // the paper's gamma: rare frequencies stay visible

function histogramChart({ cells, means }, method, title) {
  const frame = { left: 44, top: 8, size: 280 };
  const root = drawing(336, 330, title, method);
  const { group, x, y } = unitSquare(frame);
  root.append(group);
  const wide = frame.size / DATA.bins;
  const occupied = new Map(means.map(([bin, cases]) => [bin, cases]));
  const targets = cells.map(([bin, level, share]) => {
    const place = { x: x(bin / DATA.bins), y: y((level + 1) / DATA.bins), width: wide, height: wide };
    root.append(svg("rect", { ...place, class: "cell", "fill-opacity": shade(share).toFixed(3) }));
    const text = `Probabilities ${range(bin, DATA.bins)}\n${percent(share)} of ${whole.format(occupied.get(bin))} occupied bins\nhave a frequency of ${range(level, DATA.bins)}`;
    return { element: svg("rect", { ...place, class: "hit" }), text };
  });
  root.append(line(x(0), y(0), x(1), y(1), "ideal"), path(means.map((row) => [x(row[2]), y(row[3])]), "mean"));
  for (const tick of TICKS) root.append(label(tick, x(tick), 304));
  root.append(label("confidence", x(0.5), 324), label("frequency", 0, 0, "middle", { transform: `translate(6 ${y(0.5)}) rotate(-90)` }));
  root.append(...targets.map((target) => target.element));
  explain(root, targets);
  return root;
}

function shadeKey() {
  const steps = [0.01, 0.1, 0.25, 0.5, 1].map((share) => {
    const square = svg("rect", { width: 14, height: 14, rx: 2, class: "cell", "fill-opacity": shade(share) });
    return html("span", {}, svg("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, square), `${100 * share} %`);
  });
  return [html("span", { text: "Share of cases, gamma 0.35:" }), ...steps, html("span", { text: "Line: mean frequency over cases" })];
}

function radarChart({ axes, values, normalized, cases, number: cohort }) {
  const [cx, cy, radius] = [190, 150, 108];
  const title = `Radar of ${cohort} ${cases === "all" ? "" : "complete "}cases`;
  const root = drawing(380, 300, title);
  const place = (i, share) => {
    const angle = (2 * Math.PI * i) / axes.length - Math.PI / 2;
    return [cx + radius * share * Math.cos(angle), cy + radius * share * Math.sin(angle)];
  };
  for (const share of [0.25, 0.5, 0.75, 1]) {
    root.append(svg("circle", { cx, cy, r: radius * share, class: share === 1 ? "axis" : "grid" }));
  }
  axes.forEach((name, i) => {
    const [x, y] = place(i, 1.1);
    const anchor = Math.abs(x - cx) < 8 ? "middle" : x > cx ? "start" : "end";
    root.append(line(cx, cy, ...place(i, 1), "grid"), label(name, x, y + 4, anchor));
  });
  const targets = [];
  normalized.forEach((shares, method) => {
    const known = shares.map((share, i) => (share === null ? null : place(i, share)));
    const outline = path(known.filter(Boolean), "area");
    outline.setAttribute("d", `${outline.getAttribute("d")}Z`);
    const group = svg("g", { class: `m${method}` }, outline);
    known.forEach((point, i) => {
      if (!point) return;
      group.append(svg("circle", { cx: point[0], cy: point[1], r: 3.6, class: "dot" }));
      const text = `${DATA.methods[method]}\n${axes[i]} ${number(values[method][i], 4)}\n${percent(shares[i])} of the best`;
      targets.push({ element: svg("circle", { cx: point[0], cy: point[1], r: 9, class: "hit" }), text });
    });
    root.append(group);
  });
  root.append(...targets.map((target) => target.element));
  explain(root, targets);
  return root;
}

function figure(chart, method, detail) {
  return html("figure", {}, html("figcaption", {}, methodTag(method), html("span", { class: "fine", text: detail })), chart);
}
