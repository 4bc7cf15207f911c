// Files to keep, and tables as CSV.

function download(content, type, name) {
  const address = URL.createObjectURL(new Blob([content], { type }));
  html("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

function fileName(text, ending) {
  const words = text.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  return `${words.slice(0, 80) || "segcal"}.${ending}`;
}

// A button says for a moment what it did.
function done(button, text) {
  const before = (button.dataset.text ??= button.textContent);
  button.textContent = text;
  tell(`${text}: ${button.dataset.name}`);
  clearTimeout(Number(button.dataset.timer));
  button.dataset.timer = setTimeout(() => {
    button.textContent = before;
  }, 2500);
}

function toolButton(text, name, act) {
  const button = html("button", { type: "button", class: "tool", text, "aria-label": `${text}: ${name}`, "data-name": name });
  button.addEventListener("click", () => act(button));
  return button;
}

// Every cell in the places that it covers.
function tableGrid(table) {
  const grid = [...table.rows].map(() => []);
  [...table.rows].forEach((row, r) => {
    for (const cell of row.cells) {
      const c = grid[r].findIndex((there) => !there);
      const start = c < 0 ? grid[r].length : c;
      for (let i = 0; i < cell.rowSpan; i++) for (let j = 0; j < cell.colSpan; j++) grid[r + i][start + j] = cell;
    }
  });
  return grid;
}

// A minus before a number as machines write it, and nothing where there is no number.
function plain(text) {
  const trimmed = text.trim().replaceAll("\u00a0", " ");
  return ["-", "–", "[n/a]"].includes(trimmed) ? "" : trimmed.replace(/^−(?=\d)/, "-");
}

// The text of a cell as a reader sees it, without its parts.
function cellText(cell) {
  const copy = cell.cloneNode(true);
  for (const aside of copy.querySelectorAll("summary, [data-aside], [data-part]")) aside.remove();
  for (const list of copy.querySelectorAll("[data-list]")) {
    list.replaceWith([...list.children].map((item) => item.textContent.trim()).join("; "));
  }
  return plain(copy.textContent);
}

// Parts of a cell by their names: "± 0.1" of the part "std"; "[0.1, 0.2]" and "0.1 to 0.2" of the parts "low high".
function cellParts(cell) {
  const found = [...cell.querySelectorAll("[data-part]")].flatMap((element) => {
    const names = element.dataset.part.split(" ");
    const text = plain(element.textContent).replace(/^(\[|± ?|floor )|\]$/g, "");
    const values = names.length > 1 ? text.split(/, | to /) : [text];
    return names.map((name, i) => [name, plain(values[i] ?? "")]);
  });
  return new Map(found);
}

// The columns of a table, and those of the parts of its cells.
function csvText(table) {
  const [head, ...body] = tableGrid(table);
  const columns = head.flatMap((heading, c) => {
    if (heading.hasAttribute("data-aside")) return [];
    const name = cellText(heading);
    const texts = body.map((row) => cellText(row[c]));
    const parts = body.map((row) => cellParts(row[c]));
    const names = [...new Set(parts.flatMap((part) => [...part.keys()]))];
    const own = names.length && texts.every((text) => !text) ? [] : [[name, ...texts]];
    return [...own, ...names.map((each) => [`${name} ${each}`, ...parts.map((part) => part.get(each) ?? "")])];
  });
  return csvOf([head, ...body].map((_, r) => columns.map((column) => column[r])));
}

function csvOf(lines) {
  const quoted = (text) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  return `${lines.map((cells) => cells.map(quoted).join(",")).join("\n")}\n`;
}

// To the clipboard, or as a file where there is none to write to.
async function copyTable(button) {
  const table = button.closest(".frame").querySelector("table");
  table.dispatchEvent(new Event("copying", { bubbles: true }));
  const text = table.asCsv ? table.asCsv() : csvText(table);
  try {
    await navigator.clipboard.writeText(text);
    done(button, "Copied");
  } catch {
    download(text, "text/csv;charset=utf-8", fileName(button.dataset.name, "csv"));
    done(button, "Saved as a file");
  }
}

for (const frame of document.querySelectorAll(".frame")) {
  frame.append(toolButton("Copy CSV", frame.querySelector(".scroll").getAttribute("aria-label"), copyTable));
}
