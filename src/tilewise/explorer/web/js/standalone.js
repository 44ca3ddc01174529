/**
 * Starts the exported page. From a disk a browser loads no module files, so their sources lie in the page; each becomes
 * a data: address, and an import map gives it the name under which the others import it.
 */
(() => {
  const imports = Object.fromEntries(
    Array.from(document.querySelectorAll("script[data-module]"), (element) => [
      element.getAttribute("data-module"),
      `data:text/javascript;charset=utf-8,${encodeURIComponent(element.textContent)}`,
    ]),
  );
  const map = document.createElement("script");
  map.type = "importmap";
  map.textContent = JSON.stringify({ imports });
  document.head.append(map);
  import("tilewise/main.js");
})();
