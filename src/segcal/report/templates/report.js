// The report: figures in their places, the address after # and what it shows.

function labelName(chosen, together) {
  return chosen === 0 ? together : DATA.classes[chosen - 1];
}

function drawReliability(chosen) {
  const name = labelName(chosen, "all classes pooled");
  const figures = DATA.reliability.map((records, method) => {
    const { rows, errors } = records[chosen];
    const [ace, ece, mce] = errors;
    const chart = reliabilityChart(rows, method, `Reliability of ${DATA.methods[method]}, ${name}`);
    return figure(chart, method, `ACE ${number(ace)}, ECE ${number(ece, 4)}, MCE ${number(mce)} (micro, pooled)`);
  });
  document.getElementById("reliability-figures").replaceChildren(...figures);
  document.getElementById("reliability-band").textContent = `Bands: ${DATA.reliability[0][chosen].band}.`;
  document.querySelectorAll("#glance button").forEach((button, i) => button.setAttribute("aria-pressed", i + 1 === chosen));
}

function drawGlance() {
  const list = document.getElementById("glance");
  const select = document.getElementById("reliability-class");
  list?.replaceChildren(
    ...DATA.classes.map((name, i) => {
      const records = DATA.reliability.map((of) => of[i + 1]);
      const errors = records.map((record, method) => {
        const tag = html("span", { class: `method m${method}` }, html("span", { class: "swatch", "aria-hidden": "true" }));
        tag.append(`ACE ${number(record.errors[0])}`);
        return tag;
      });
      const button = html("button", { type: "button" }, html("b", { text: name }), glanceChart(records, `Reliability, ${name}`), ...errors);
      button.addEventListener("click", () => {
        select.value = i + 1;
        drawReliability(i + 1);
        document.getElementById("reliability").scrollIntoView();
      });
      return html("li", {}, button);
    }),
  );
}

function drawSpread(chosen) {
  const name = labelName(chosen, "average of classes");
  const figures = DATA.histograms.map((records, method) => {
    const chart = histogramChart(records[chosen], method, `Dataset reliability histogram of ${DATA.methods[method]}, ${name}`);
    return figure(chart, method, name);
  });
  document.getElementById("spread-figures").replaceChildren(...figures);
}

function drawRadar() {
  const figures = DATA.radar.map((radar) => {
    const cases = radar.number === 1 ? "case" : "cases";
    const caption = radar.cases === "all" ? `All ${radar.number} ${cases}` : `The ${radar.number} complete ${cases}`;
    return html("figure", {}, html("figcaption", { text: caption }), radarChart(radar));
  });
  if (!figures.length) return;
  const key = html("p", { class: "key" }, ...DATA.methods.map((_, method) => methodTag(method)));
  document.getElementById("radar-figures").replaceChildren(...figures);
  document.getElementById("radar-figures").after(key);
}

function onChoice(id, draw) {
  const select = document.getElementById(id);
  select.addEventListener("change", () => draw(Number(select.value)));
  draw(Number(select.value));
}

function caseInAddress() {
  if (!location.hash.startsWith("#case=")) return -1;
  try {
    return CASES.names.indexOf(decodeURIComponent(location.hash.slice("#case=".length)));
  } catch {
    return -1; // an address that was cut short
  }
}

let left = null; // where the report was left: the address, and how far down

// A case has a page of its own; going back finds the report where it was left.
function follow({ oldURL } = {}) {
  const report = document.getElementById("report");
  const page = document.getElementById("case");
  const i = caseInAddress();
  hideTip();
  if (i >= 0) {
    if (!report.hidden && oldURL) left = { hash: new URL(oldURL).hash, top: scrollY };
    drawCase(i);
    report.hidden = true;
    page.hidden = false;
    scrollTo({ top: 0, behavior: "instant" });
    page.focus({ preventScroll: true });
  } else if (report.hidden) {
    page.hidden = true;
    report.hidden = false;
    const back = left && ["#cases", left.hash].includes(location.hash);
    if (back) scrollTo({ top: left.top, behavior: "instant" });
    else document.getElementById(location.hash.slice(1))?.scrollIntoView({ behavior: "instant" });
  }
}

// A click, or Enter, on a map shows it as large as the window lets it; a click or Escape closes it.
function startMaps() {
  const large = document.getElementById("large");
  document.addEventListener("click", (event) => {
    const button = event.target.closest(".enlarge");
    if (!button) return;
    const figure = button.closest("figure");
    const picture = button.querySelector("img").cloneNode();
    const name = `${figure.dataset.case}: ${(figure.querySelector("figcaption span") ?? figure.querySelector("figcaption")).textContent}`;
    picture.alt = name;
    const close = html("button", { type: "button", text: "Close" });
    large.replaceChildren(html("p", {}, html("span", { text: name }), close), picture);
    large.showModal();
  });
  large.addEventListener("click", () => large.close());
  addEventListener("hashchange", () => large.close());
}

drawGlance();
onChoice("reliability-class", drawReliability);
onChoice("spread-class", drawSpread);
document.getElementById("save-comparison").addEventListener("click", async () => save(await unpacked(DATA.csv), "comparison.csv"));
document.getElementById("spread-key").replaceChildren(...shadeKey());
startDecisions();
drawRadar();
startMaps();
unpacked(CASES.values).then((bytes) => {
  CASES.values = JSON.parse(new TextDecoder().decode(bytes));
  startTable();
  addEventListener("hashchange", follow);
  follow();
});
