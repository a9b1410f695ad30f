// Sorts a table by the column whose heading is activated; numbers by value, the rest as text.
document.querySelectorAll("table.sortable").forEach((table) => {
  const body = table.tBodies[0];
  table.querySelectorAll("thead th button").forEach((button, column) => {
    button.addEventListener("click", () => {
      const head = button.parentElement;
      const up = head.getAttribute("aria-sort") !== "ascending";
      table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => {
        const cell = row.cells[column];
        return cell.dataset.key === undefined ? cell.textContent : Number(cell.dataset.key);
      };
      const missing = (value) => value === "–";
      const rows = Array.from(body.rows, (row) => [key(row), row]);
      rows.sort(([a], [b]) => {
        if (missing(a) || missing(b)) return missing(a) - missing(b);
        const order = typeof a === "number" && typeof b === "number"
          ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
        return up ? order : -order;
      });
      body.append(...rows.map(([, row]) => row));
    });
  });
});
