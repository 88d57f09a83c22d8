// Turns folded parts into a slide show: a slider, two buttons, arrow keys. Found by class and marked once set up.
document.querySelectorAll(".mc .steps:not(.live)").forEach((root) => {
  root.classList.add("live");
  const frames = [...root.children].filter((part) => part.tagName === "DETAILS");
  if (frames.length < 2) return;
  const make = (tag, attributes) => Object.assign(document.createElement(tag), attributes);
  const bar = make("div", { className: "bar" }), count = make("span", {});
  const slider = make("input", { type: "range", min: 0, max: frames.length - 1, value: 0 });
  slider.setAttribute("aria-label", "step");
  const back = make("button", { type: "button", textContent: "‹" });
  const on = make("button", { type: "button", textContent: "›" });
  function show() {
    const at = Number(slider.value);
    frames.forEach((frame, i) => {
      frame.style.display = i === at ? "" : "none";
      frame.open = i === at;
    });
    count.textContent = `${at + 1} of ${frames.length}`;
  }
  function go(by) {
    slider.value = Number(slider.value) + by;
    show();
  }
  slider.addEventListener("input", show);
  // Or the notebook takes the keys; those with Ctrl stay its own.
  slider.addEventListener("keydown", (event) => event.ctrlKey || event.metaKey || event.stopPropagation());
  back.addEventListener("click", () => go(-1));
  on.addEventListener("click", () => go(1));
  bar.append(back, slider, on, count);
  root.prepend(bar);
  show();
});
