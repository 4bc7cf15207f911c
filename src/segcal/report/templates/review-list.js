// The list of cases: which are shown, in which order, and rows for those alone that are in view, however many there are.

const DATA = JSON.parse(document.getElementById("data").textContent);
const part = (id) => document.getElementById(id);
const shownNumber = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));

const ROW_PX = 44; // as in review.css
const SPARE = 10; // rows above and below what is in view

class CaseList {
  // `decisionOf` gives the decision of a case, or nothing; `open` is called with the case that is chosen.
  constructor(decisionOf, open) {
    Object.assign(this, { decisionOf, open, order: [], chosen: null, rows: new Map() });
    this.form = part("filters");
    this.form.addEventListener("input", () => this.update());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    const list = part("list");
    list.addEventListener("scroll", () => this.drawSoon(), { passive: true });
    list.addEventListener("keydown", (event) => this.press(event));
    part("rows").addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) this.open(this.result.cases[Number(row.dataset.case)]);
    });
    new ResizeObserver(() => this.drawSoon()).observe(list);
  }

  show(result) {
    this.result = result;
    this.places = new Map(result.cases.map((name, i) => [name, i]));
    this.lower = result.cases.map((name) => name.toLowerCase());
    const options = (name, texts) => this.form.elements[name].replaceChildren(...texts.map(([value, text]) => html("option", { value, text })));
    options("class", [[0, "all classes"], ...result.classes.map((name, i) => [i + 1, name])]);
    options("flag", [["", "all"], ["none", "without a flag"], ["any", "with a flag"], ...result.flagNames.map((name, i) => [`${i}`, name])]);
    options("metric", result.metrics.map(({ name, heading }) => [name, heading]));
    this.update();
  }

  get column() {
    return Number(this.form.elements.class.value);
  }

  // Numbers of the form; null where a field is empty.
  bound(name) {
    const { value } = this.form.elements[name];
    return value === "" || Number.isNaN(Number(value)) ? null : Number(value);
  }

  passes(i) {
    const { text, flag, decision, metric } = this.form.elements;
    if (text.value && !this.lower[i].includes(text.value.trim().toLowerCase())) return false;
    const flags = this.result.flags[i][this.column];
    if (flag.value === "none" ? flags.length : flag.value === "any" ? !flags.length : flag.value && !flags.includes(Number(flag.value))) return false;
    const made = this.decisionOf(this.result.cases[i]);
    if (decision.value === "open" && made?.decision) return false;
    if (decision.value === "comment" && !made?.comment) return false;
    if (["accept", "reject"].includes(decision.value) && made?.decision !== decision.value) return false;
    const [from, to] = [this.bound("from"), this.bound("to")];
    if (from === null && to === null) return true;
    const value = this.result.values[metric.value][i][this.column];
    return value !== null && (from === null || value >= from) && (to === null || value <= to);
  }

  // The numbers to sort by, the least first; what has none comes last.
  keys() {
    const { order, metric } = this.form.elements;
    const values = order.value === "quality" ? this.result.quality : this.result.values[metric.value];
    const sign = order.value === "down" ? -1 : 1;
    return values.map((row) => (row[this.column] === null ? Infinity : sign * row[this.column]));
  }

  update() {
    const all = this.result.cases.map((_, i) => i);
    this.order = all.filter((i) => this.passes(i));
    if (this.form.elements.order.value === "name") {
      const collator = new Intl.Collator(undefined, { numeric: true });
      this.order.sort((a, b) => collator.compare(this.result.cases[a], this.result.cases[b]));
    } else {
      const keys = this.keys();
      this.order.sort((a, b) => (keys[a] === keys[b] ? a - b : keys[a] - keys[b]));
    }
    part("rows").style.height = `${this.order.length * ROW_PX}px`;
    part("shown").textContent = `${this.order.length} of ${all.length} cases, ordered by ${this.orderName()}`;
    this.clear();
    this.draw();
  }

  orderName() {
    const { order, metric } = this.form.elements;
    if (order.value === "name") return "name";
    if (order.value === "quality") return `${this.result.qualityName}, lowest first`;
    return `${metric.selectedOptions[0]?.textContent}, ${order.value === "up" ? "lowest" : "highest"} first`;
  }

  // Rows anew, as after a decision.
  redraw() {
    this.clear();
    this.draw();
  }

  clear() {
    this.rows.clear();
    part("rows").replaceChildren();
  }

  drawSoon() {
    this.waiting ??= requestAnimationFrame(() => {
      this.waiting = null;
      this.draw();
    });
  }

  draw() {
    const list = part("list");
    const first = Math.max(0, Math.floor(list.scrollTop / ROW_PX) - SPARE);
    const last = Math.min(this.order.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW_PX) + SPARE);
    for (const [place, row] of this.rows) {
      if (place >= first && place < last) continue;
      row.remove();
      this.rows.delete(place);
    }
    const made = [];
    for (let place = first; place < last; place++) {
      if (this.rows.has(place)) continue;
      const row = this.row(place);
      this.rows.set(place, row);
      made.push(row);
    }
    part("rows").append(...made);
    this.mark();
  }

  row(place) {
    const i = this.order[place];
    const { cases, quality, flags, flagNames } = this.result;
    const made = this.decisionOf(cases[i]);
    const { order, metric } = this.form.elements;
    const own = this.result.metrics.find(({ name }) => name === metric.value);
    const byMetric = ["up", "down"].includes(order.value);
    const value = byMetric ? shownNumber(this.result.values[own.name][i][this.column], own.digits) : shownNumber(quality[i][this.column], 3);
    const told = [...flags[i][this.column].map((flag) => flagNames[flag]), made?.comment].filter(Boolean).join(" · ");
    const decided = { accept: "accepted", reject: "rejected" }[made?.decision];
    const row = html(
      "div",
      { role: "option", id: `row-${i}`, class: `row ${made?.decision ?? ""}`, "data-case": i, "aria-setsize": this.order.length, "aria-posinset": place + 1 },
      html("span", { class: "value", text: value }),
      html("span", { class: "what" }, html("span", { text: cases[i] }), html("span", { class: "fine", text: told })),
      html("span", { class: "mark" }, html("span", { "aria-hidden": "true", text: { accept: "✓", reject: "✗" }[made?.decision] ?? "" }), html("span", { class: "hidden", text: decided ?? "" })),
    );
    row.style.top = `${place * ROW_PX}px`;
    return row;
  }

  mark() {
    const list = part("list");
    list.removeAttribute("aria-activedescendant");
    for (const [place, row] of this.rows) {
      const isChosen = this.result.cases[this.order[place]] === this.chosen;
      row.setAttribute("aria-selected", isChosen);
      if (isChosen) list.setAttribute("aria-activedescendant", row.id);
    }
  }

  choose(name) {
    this.chosen = name;
    const place = this.placeOf(name);
    const list = part("list");
    if (place >= 0) {
      const top = place * ROW_PX;
      if (top < list.scrollTop) list.scrollTop = top;
      if (top + ROW_PX > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW_PX - list.clientHeight;
    }
    this.draw();
  }

  placeOf(name) {
    return this.order.indexOf(this.places.get(name));
  }

  // The case so many steps on, or null; from one that is not shown, the first.
  neighbor(name, step) {
    const place = this.placeOf(name);
    return this.result.cases[this.order[place < 0 ? 0 : place + step]] ?? null;
  }

  // The next case without a decision, after this one or from the start; null where all are decided.
  undecided(name) {
    const place = this.placeOf(name);
    const turned = [...this.order.slice(place + 1), ...this.order.slice(0, Math.max(0, place))];
    const found = turned.find((i) => !this.decisionOf(this.result.cases[i])?.decision);
    return this.result.cases[found] ?? null;
  }

  press(event) {
    const page = Math.max(1, Math.floor(part("list").clientHeight / ROW_PX) - 1);
    const place = this.placeOf(this.chosen);
    const to = { ArrowDown: place + 1, ArrowUp: place - 1, PageDown: place + page, PageUp: place - page, Home: 0, End: this.order.length - 1 }[event.key];
    if (to === undefined || event.ctrlKey || event.metaKey || event.altKey || !this.order.length) return;
    event.preventDefault();
    this.open(this.result.cases[this.order[Math.min(this.order.length - 1, Math.max(0, to))]]);
  }
}
