// What scrolls can be reached by the keyboard.
addEventListener("load", () => {
  for (const box of document.querySelectorAll("pre, table, .table-wrapper, .mc .body, .mc .in, .mc .foot > div")) {
    const scrolls = box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight;
    if (scrolls && getComputedStyle(box).overflow !== "visible") box.tabIndex = 0;
  }
});
