"use strict";
// The whole script of a sweep's page: a click on a column's head sorts the rows of its table. It builds no markup.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = Array.from(table.tHead.rows[0].cells);
  heads.forEach((head, column) => {
    const button = head.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      const before = head.getAttribute("aria-sort");
      const first = head.dataset.first || "ascending";
      const second = first === "ascending" ? "descending" : "ascending";
      const direction = before === first ? second : first;
      const sign = direction === "ascending" ? 1 : -1;
      const value = (row) => row.cells[column].dataset.sort;
      const compare = head.dataset.kind === "number"
        ? (a, b) => Number(a) - Number(b)
        : (a, b) => a.localeCompare(b, "en", { numeric: true });
      const rows = Array.from(body.rows);
      rows.sort((one, two) => {
        const a = value(one), b = value(two);
        // What is missing stands last, whichever way the rest is sorted.
        if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
        return sign * compare(a, b);
      });
      body.append(...rows);
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", direction);
    });
  });
  table.classList.add("scripted");
}
