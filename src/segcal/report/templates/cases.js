// The table of cases (sorted, filtered) and the page of a single case.

const CASES = DATA.cases;
const AT_ONCE = 50; // rows shown at first
const MOST_AT_ONCE = 1000; // rows shown at a further click
const table = document.getElementById("case-table");
const filters = document.getElementById("filters");
const order = { column: CASES.columns.indexOf("ACE"), down: true }; // worst calibrated first
let most = AT_ONCE; // rows that may be shown
const SHOWN = CASES.shown && new Map(CASES.shown.map((i, row) => [i, row])); // of these the page has diagrams

function caseLink(i, text = CASES.names[i]) {
  return html("a", { href: `#case=${encodeURIComponent(CASES.names[i])}`, text });
}

function missingNames(i) {
  return CASES.missing[i].map((c) => DATA.classes[c]).join(", ");
}

function patientOf(i) {
  return CASES.patients ? CASES.patients[i] : CASES.names[i];
}

// The numbers of a case by a method, of the chosen class (0: their mean); nothing where the method lacks it.
function valuesOf(method, i, chosen) {
  return CASES.values[method][i]?.[chosen];
}

// The rows of a case's diagrams, class by class; nothing where the page has none, or the method lacks the case.
function diagramsOf(method, i) {
  return CASES.rows[method][SHOWN ? SHOWN.get(i) : i];
}

// Every case of every method that has it, with the numbers of the chosen class (0: their mean).
function allRows(chosen) {
  return CASES.names.flatMap((name, i) =>
    DATA.methods
      .map((_, method) => ({ i, name, method, values: valuesOf(method, i, chosen) }))
      .filter((row) => row.values),
  );
}

function wanted(row, { text, method, below, missing }) {
  const haystack = `${row.name}\n${patientOf(row.i)}`.toLowerCase();
  const dice = row.values[0];
  return (
    haystack.includes(text.toLowerCase()) &&
    (method === "" || Number(method) === row.method) &&
    (below === "" || (dice !== null && dice < Number(below))) &&
    (!missing || CASES.missing[row.i].length > 0)
  );
}

const byName = new Intl.Collator("en", { numeric: true }).compare;

function sortKey(row) {
  if (order.column === "case") return row.name;
  if (order.column === "method") return DATA.methods[row.method];
  if (order.column === "missing") return CASES.missing[row.i].length;
  return row.values[order.column];
}

// Numbers by value, words with the numbers in them by value; what has no number comes last either way.
function compareRows(a, b) {
  const [x, y] = [sortKey(a), sortKey(b)];
  const tie = () => byName(a.name, b.name) || a.method - b.method;
  if (x === null || y === null) return (x === null) - (y === null) || tie();
  const way = typeof x === "string" ? byName(x, y) : x - y;
  return (order.down ? -way : way) || tie();
}

function tableHead() {
  const columns = [["case", "Case"], ...(DATA.methods.length > 1 ? [["method", "Method"]] : [])];
  CASES.columns.forEach((name, i) => columns.push([i, name]));
  columns.push(["missing", "Missing"]);
  const cells = columns.map(([key, name]) => {
    const button = html("button", { type: "button", text: name });
    const cell = html("th", { scope: "col", class: typeof key === "number" ? "number" : null, "data-key": key }, button);
    button.addEventListener("click", () => {
      const again = order.column === key;
      order.down = again ? !order.down : typeof key === "number" && name !== "DSC";
      order.column = key;
      drawTable();
    });
    return cell;
  });
  table.tHead.replaceChildren(html("tr", {}, ...cells));
}

function tableRow(row) {
  const cells = [html("td", { class: "case" }, caseLink(row.i))];
  if (DATA.methods.length > 1) cells.push(html("td", {}, methodTag(row.method)));
  row.values.forEach((value, i) => cells.push(html("td", { class: "number", text: number(value, CASES.digits[i]) })));
  cells.push(html("td", { text: missingNames(row.i) }));
  return html("tr", {}, ...cells);
}

// The rows that the filters leave, sorted, and of how many.
function foundRows() {
  const chosen = Object.fromEntries(new FormData(filters));
  const rows = allRows(Number(chosen.class));
  return { found: rows.filter((row) => wanted(row, { method: "", ...chosen })).sort(compareRows), all: rows.length };
}

function drawTable() {
  const { found, all } = foundRows();
  const shown = found.slice(0, most);
  table.tBodies[0].replaceChildren(...shown.map(tableRow));
  for (const cell of table.tHead.rows[0].cells) {
    if (cell.dataset.key === String(order.column)) cell.setAttribute("aria-sort", order.down ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  }
  const part = shown.length < found.length ? `, the first ${shown.length} shown` : "";
  document.getElementById("cases-shown").textContent = `${found.length} of ${all} ${all === 1 ? "row" : "rows"}${part}`;
  const more = document.getElementById("more");
  more.hidden = shown.length === found.length;
  more.textContent = found.length - shown.length <= MOST_AT_ONCE ? "Show all" : `Show ${MOST_AT_ONCE} more`;
}

// Every row that the filters leave, also those that the table does not show yet.
function casesAsCsv() {
  const rows = foundRows().found.map(({ i, name, method, values }) => [name, DATA.methods[method], ...values, missingNames(i)]);
  const quoted = (value) => (/[",\n\r]/.test(value) ? `"${value.replaceAll('"', '""')}"` : (value ?? ""));
  return [["Case", "Method", ...CASES.columns, "Missing"], ...rows].map((row) => `${row.map(quoted).join(",")}\n`).join("");
}

function startTable() {
  tableHead();
  filters.addEventListener("input", () => {
    most = AT_ONCE;
    drawTable();
  });
  filters.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("more").addEventListener("click", () => {
    most += MOST_AT_ONCE;
    drawTable();
  });
  document.getElementById("save-cases").addEventListener("click", () => save(casesAsCsv(), "cases.csv"));
  drawTable();
}

function caseFigure(i, method, chosen) {
  const values = valuesOf(method, i, chosen + 1);
  if (!values) return figure(html("p", { class: "notes", text: "This method lacks the case." }), method, "");
  const [dice, ace] = values;
  const title = `Reliability of ${DATA.methods[method]}, ${DATA.classes[chosen]}, case ${CASES.names[i]}`;
  const rows = diagramsOf(method, i);
  if (!rows) return figure(numbersOf(values), method, "Numbers only");
  return figure(reliabilityChart(rows[chosen], method, title, [0, 0.5, 1]), method, `DSC ${number(dice)}, ACE ${number(ace)}`);
}

// The numbers of a case whose diagrams are not in the page.
function numbersOf(values) {
  const cells = values.map((value, column) =>
    html("div", {}, html("dt", { text: CASES.columns[column] }), html("dd", { text: number(value, CASES.digits[column]) })),
  );
  return html("dl", { class: "facts" }, ...cells);
}

function step(id, i) {
  const link = document.getElementById(id);
  link.hidden = i < 0 || i >= CASES.names.length;
  if (!link.hidden) link.setAttribute("href", caseLink(i).getAttribute("href"));
}

// The maps of a case that the report shows, again.
function caseMaps(i) {
  const own = [...document.querySelectorAll("#maps figure")].filter((figure) => figure.dataset.case === CASES.names[i]);
  const copies = own.map((figure) => {
    const copy = figure.cloneNode(true);
    copy.querySelector("figcaption").replaceChildren(figure.querySelector("figcaption span").textContent);
    return copy;
  });
  return copies.length ? [html("h2", { text: "Probability maps" }), html("div", { class: "maps" }, ...copies)] : [];
}

function drawCase(i) {
  document.getElementById("case-title").textContent = CASES.names[i];
  const patient = patientOf(i) === CASES.names[i] ? [] : [`Patient ${patientOf(i)}`];
  const missing = CASES.missing[i].length ? [`Missing: ${missingNames(i)}`] : ["Every class is present"];
  const without = SHOWN && !SHOWN.has(i)
    ? [`This page has the diagrams of ${whole.format(SHOWN.size)} of ${whole.format(CASES.names.length)} cases; of this one it has numbers alone`] : [];
  document.getElementById("case-meta").textContent = [...patient, ...missing, ...without].join(". ");
  const groups = DATA.classes.map((name, c) => {
    const absent = CASES.missing[i].includes(c) ? " (not in this case)" : "";
    const pair = html("div", { class: "pair" }, ...DATA.methods.map((_, method) => caseFigure(i, method, c)));
    return html("div", {}, html("h2", { text: name + absent }), pair);
  });
  document.getElementById("case-figures").replaceChildren(...groups);
  document.getElementById("case-maps").replaceChildren(...caseMaps(i));
  step("case-before", i - 1);
  step("case-after", i + 1);
}
