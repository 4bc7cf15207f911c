// Decisions: what was promised of every case and what came of it. All numbers come from Python.

const DECISIONS = DATA.decisions;
const DOTS = SHOWN ? `A dot is a case, of ${whole.format(SHOWN.size)} out of ${whole.format(CASES.names.length)}.` : "A dot is a case.";
const BOX = { left: 54, top: 8, width: 274, height: 240 };
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

// Round numbers from below the lowest to above the highest value.
function roundTicks(low, high, most = 5) {
  const rough = (high - low || Math.abs(high) || 1) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((part) => part * power >= rough * 0.999);
  const first = Math.floor(low / step + 1e-9);
  const last = Math.max(first + 1, Math.ceil(high / step - 1e-9));
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
}

// An empty chart with ticks on both axes; x and y place values in it.
function plainChart({ title, xTicks, yTicks, xName, yName }) {
  const { left, top, width, height } = BOX;
  const root = drawing(336, 290, title);
  const along = (ticks, value) => (value - ticks[0]) / (ticks.at(-1) - ticks[0]);
  const x = (value) => left + width * along(xTicks, value);
  const y = (value) => top + height * (1 - along(yTicks, value));
  for (const tick of yTicks) {
    root.append(line(left, y(tick), left + width, y(tick), "grid"), label(amount(tick), left - 6, y(tick) + 4, "end"));
  }
  for (const tick of xTicks) {
    root.append(line(x(tick), top, x(tick), top + height, "grid"), label(amount(tick), x(tick), top + height + 16));
  }
  root.append(label(xName, left + width / 2, top + height + 36));
  root.append(label(yName, 0, 0, "middle", { transform: `translate(9 ${top + height / 2}) rotate(-90)` }));
  return { root, x, y };
}

function amount(value) {
  return compact.format(Math.abs(value) < 1e-9 ? 0 : value).replace("-", "−");
}

// Every method that has records, with the record of the chosen class.
function decided(chosen) {
  return DECISIONS.methods.flatMap((records, method) => (records ? [{ method, ...records[chosen] }] : []));
}

// A dot for each case and method, which tells its numbers and opens the case.
function casePoints({ root, x, y }, records, columns, tell) {
  const targets = [];
  for (const [i, record] of records.entries()) {
    const [xs, ys] = columns(record);
    const r = 3.2 + 0.9 * (records.length - 1 - i); // so that methods that decide alike do not hide each other
    const group = svg("g", { class: `m${record.method} many` });
    DECISIONS.cases.forEach((at, row) => {
      const [a, b] = [xs[row], ys[row]];
      if (a === null || b === null) return;
      const place = { cx: x(a).toFixed(1), cy: y(b).toFixed(1) };
      group.append(svg("circle", { ...place, r, class: "dot" }));
      const element = svg("circle", { ...place, r: 7, class: "hit opens" });
      element.addEventListener("click", () => {
        location.hash = caseLink(at).hash;
      });
      targets.push({ element, text: `${CASES.names[at]}\n${DATA.methods[record.method]}\n${tell(a, b)}` });
    });
    root.append(group);
  }
  root.append(...targets.map((target) => target.element));
  explain(root, targets);
}

function promiseChart(records, title) {
  const known = records.flatMap(({ expected, actual }) => [...expected, ...actual]).filter((value) => value !== null);
  const low = Math.min(0.8, Math.floor(10 * Math.min(...known, 1)) / 10);
  const ticks = roundTicks(low, 1);
  const chart = plainChart({ title, xTicks: ticks, yTicks: ticks, xName: "expected DSC", yName: "actual DSC" });
  chart.root.append(line(chart.x(ticks[0]), chart.y(ticks[0]), chart.x(1), chart.y(1), "ideal"));
  const tell = (promised, actual) => `Expected DSC ${number(promised)}\nActual DSC ${number(actual)}`;
  casePoints(chart, records, ({ expected, actual }) => [expected, actual], tell);
  return chart.root;
}

// Tips on upright strips, one for each point of a curve.
function strips({ root, x }, values, tell) {
  const targets = values.map((value, i) => {
    const start = i ? (values[i - 1] + value) / 2 : value;
    const end = i + 1 < values.length ? (values[i + 1] + value) / 2 : value;
    const wide = Math.max(1, x(end) - x(start));
    return { element: svg("rect", { x: x(start), y: BOX.top, width: wide, height: BOX.height, class: "hit" }), text: tell(i) };
  });
  root.append(...targets.map((target) => target.element));
  explain(root, targets);
}

function longest(lists) {
  return lists.reduce((a, b) => (b.length > a.length ? b : a), []);
}

function curve({ x, y }, xs, ys, kind) {
  return path(xs.flatMap((value, i) => (ys[i] === null ? [] : [[x(value), y(ys[i])]])), kind);
}

function riskChart(records, title) {
  const most = Math.max(0.01, ...records.flatMap(({ risk }) => risk[1]));
  const chart = plainChart({ title, xTicks: TICKS, yTicks: roundTicks(0, most), xName: "share of cases taken, highest expected DSC first", yName: "mean of 1 − DSC" });
  for (const { method, risk, chance } of records) {
    const [coverage, ordered, ideal] = risk;
    if (!coverage.length) continue;
    const group = svg("g", { class: `m${method}` }, curve(chart, coverage, ideal, "trace promise"), curve(chart, coverage, ordered, "trace"));
    group.append(line(chart.x(0), chart.y(chance), chart.x(1), chart.y(chance), "chance"));
    chart.root.append(group);
  }
  const shown = longest(records.map(({ risk }) => risk[0]));
  strips(chart, shown, (i) => {
    const lines = records.filter(({ risk }) => risk[0].length === shown.length)
      .map(({ method, risk, chance }) => `${DATA.methods[method]}: ${number(risk[1][i])}, ideal ${number(risk[2][i])}, random ${number(chance)}`);
    return [`${percent(shown[i])} of cases taken`, ...lines].join("\n");
  });
  return chart.root;
}

// quantity: 0 Dice, 1 sensitivity, 2 precision.
function thresholdChart(records, quantity, title) {
  const name = ["DSC", "sensitivity", "precision"][quantity];
  const chart = plainChart({ title, xTicks: TICKS, yTicks: TICKS, xName: "threshold", yName: `mean ${name}` });
  const marks = [];
  for (const { method, thresholds, curves, best, promised } of records) {
    const [actual, expected] = curves.slice(2 * quantity);
    const group = svg("g", { class: `m${method}` }, curve(chart, thresholds, expected, "trace promise"), curve(chart, thresholds, actual, "trace"));
    chart.root.append(group);
    if (quantity || best[0] === null) continue;
    const [full, ring] = [best, promised].map(([threshold, dice], i) => svg("circle", { cx: chart.x(threshold), cy: chart.y(dice), r: 4.5, class: i ? "ring" : "dot" }));
    marks.push(svg("g", { class: `m${method}` }, ring, full));
  }
  chart.root.append(...marks);
  const shown = longest(records.map(({ thresholds }) => thresholds));
  strips(chart, shown, (i) => {
    const lines = records.filter(({ thresholds }) => thresholds.length === shown.length).map(({ method, curves }) => `${DATA.methods[method]}: ${name} ${number(curves[2 * quantity][i])}, expected ${number(curves[2 * quantity + 1][i])}`);
    return [`Threshold ${number(shown[i], 2)}`, ...lines].join("\n");
  });
  return chart.root;
}

function volumeChart(records, title) {
  const means = records.flatMap(({ volumes }) => volumes.mean).filter((value) => value !== null);
  const spread = records.flatMap(({ volumes }) => [...volumes.difference, ...volumes.limits]).filter((value) => value !== null);
  if (!means.length) return html("p", { class: "notes", text: "No case has this class, in its labels or in a decision." });
  const chart = plainChart({
    title,
    xTicks: roundTicks(Math.min(0, ...means), Math.max(...means)),
    yTicks: roundTicks(Math.min(0, ...spread), Math.max(0, ...spread)),
    xName: `mean of decided and true volume, ${DECISIONS.unit}`,
    yName: `decided less true, ${DECISIONS.unit}`,
  });
  const { x, y } = chart;
  const [start, end] = [BOX.left, BOX.left + BOX.width];
  chart.root.append(line(start, y(0), end, y(0), "ideal"));
  for (const { method, volumes } of records) {
    const lines = volumes.limits.map((value, i) => (value === null ? null : line(start, y(value), end, y(value), i === 1 ? "trace" : "trace promise")));
    chart.root.append(svg("g", { class: `m${method}` }, ...lines.filter(Boolean)));
  }
  const tell = (mean, difference) => `Mean volume ${amount(mean)} ${DECISIONS.unit}\nDecided less true ${amount(difference)} ${DECISIONS.unit}`;
  casePoints(chart, records, ({ volumes }) => [volumes.mean, volumes.difference], tell);
  return chart.root;
}

function described(caption, detail, chart) {
  return html("figure", {}, html("figcaption", {}, html("b", { text: caption }), html("span", { class: "fine", text: detail })), chart);
}

function decisionTable(records) {
  const heads = records.map(({ method }) => html("th", { scope: "col", class: "number" }, methodTag(method)));
  const rows = DECISIONS.rows.map((name, i) => {
    const cells = records.map(({ table: numbers }) => {
      const [value, remark] = numbers[i];
      return html("td", { class: "number" }, value, ...(remark ? [html("span", { class: "fine", text: remark })] : []));
    });
    return html("tr", {}, html("th", { scope: "row", text: name }), ...cells);
  });
  const caption = html("caption", { class: "hidden", text: "Expected and actual quality of decisions" });
  const head = html("thead", {}, html("tr", {}, html("th", { scope: "col", text: "Quantity" }), ...heads));
  return html("table", {}, caption, head, html("tbody", {}, ...rows));
}

function drawDecisions() {
  const chosen = Number(document.getElementById("decisions-class").value);
  const quantity = Number(document.getElementById("decisions-curve").value);
  const records = decided(chosen);
  const name = labelName(chosen, DATA.classes.length > 1 ? "average of classes" : DATA.classes[0]);
  const volumes = records[0].volumes
    ? volumeChart(records, `Bland–Altman, ${name}`)
    : html("p", { class: "notes", text: "Volumes are compared class by class: choose a class above." });
  document.getElementById("decisions-figures").replaceChildren(
    described("Expected and actual DSC", `${DOTS} On the dashed line expected and actual DSC agree; below it the DSC is overestimated.`, promiseChart(records, `Expected and actual DSC, ${name}`)),
    described("Risk and coverage", "Solid: cases in the order of their expected DSC. Dashed: ideal order. Dotted: random order.", riskChart(records, `Risk and coverage, ${name}`)),
    described("Thresholds", "Solid: against the labels. Dashed: expected. Dots: the largest mean DSC of each.", thresholdChart(records, quantity, `Threshold curves, ${name}`)),
    described("Volumes (Bland–Altman)", records[0].volumes ? `${DOTS} Solid: mean difference. Dashed: 95 % limits of agreement.` : "", volumes),
  );
  document.getElementById("decisions-table").replaceChildren(decisionTable(records));
}

function startDecisions() {
  if (!document.getElementById("decisions-figures")) return;
  const key = decided(0).map(({ method }) => methodTag(method));
  document.getElementById("decisions-key").replaceChildren(...key);
  for (const id of ["decisions-class", "decisions-curve"]) document.getElementById(id).addEventListener("change", drawDecisions);
  drawDecisions();
}
