/* The catalogue of techniques: a field that filters rows by words, and short rows whose details open. */
(() => {
  const table = [...document.querySelectorAll("article table")].find(
    (t) => t.querySelector("th")?.textContent.trim() === "technique" && t.tBodies[0].rows.length > 50,
  );
  if (!table) return;
  table.dataset.catalogue = "";
  const rows = [...table.tBodies[0].rows];
  const [, , , , proof, figure] = [...table.tHead.rows[0].cells];
  figure.textContent = "figure, proof, module";
  proof.remove();
  table.tHead.rows[0].cells[2].remove();
  for (const row of rows) {
    const [, , module, recipe, proof, figure] = [...row.cells];
    const details = document.createElement("details");
    const summary = document.createElement("summary");
    const first = figure.textContent.split(";")[0].trim();
    summary.textContent = first.length > 70 ? first.slice(0, 67).replace(/\s+\S*$/, "") + " ..." : first;
    details.append(summary);
    for (const [name, cell] of [["Figure", figure], ["Run", recipe], ["Proof", proof], ["Module", module]]) {
      const line = document.createElement("p");
      line.append(name + ": ", ...[...cell.childNodes].map((node) => node.cloneNode(true)));
      details.append(line);
    }
    figure.replaceChildren(details);
    module.remove();
    proof.remove();
    const code = recipe.querySelector("code") ?? recipe;
    if (code.textContent.endsWith(".toml") || code.textContent.includes(".toml ")) code.textContent = code.textContent.split(".toml")[0];
    row.words = row.textContent.toLowerCase();
  }
  const field = document.createElement("input");
  field.type = "search";
  field.placeholder = "Filter: muon, pipeline, Rajbhandari, 8 bits, soak ...";
  field.setAttribute("aria-label", "Filter techniques");
  const count = document.createElement("span");
  const bar = document.createElement("div");
  bar.className = "catalogue-filter";
  bar.append(field, count);
  (table.closest(".md-typeset__scrollwrap") ?? table).before(bar);
  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      row.hidden = !words.every((word) => row.words.includes(word));
      shown += !row.hidden;
    }
    count.textContent = `${shown} of ${rows.length}`;
  };
  field.addEventListener("input", show);
  show();
})();
