// Brings the linked view of a trace to life. Views are found by class and marked once they are set up, so that
// an object shown twice works twice. Without this script the view still has its colours and titles.
document.querySelectorAll(".mc.trace:not(.live)").forEach((root) => {
  root.classList.add("live");
  const all = (selector) => [...root.querySelectorAll(selector)];
  const lines = all(".pane .ln"), panes = all(".pane");
  const box = root.querySelector(".panes"), svg = root.querySelector(".wires");
  const what = root.querySelector(".what"), why = root.querySelector(".why");
  const still = { what: what.innerHTML, why: why.innerHTML, colour: why.style.borderLeftColor };
  const info = new Map(); // line -> what is known about it
  const linesOf = new Map(); // operation number -> lines that came from it
  const paneOf = new Map();
  let pinned = null, current = null, lit = [];

  panes.forEach((pane) => pane.querySelectorAll(".ln").forEach((line) => paneOf.set(line, pane)));
  lines.forEach((line) => {
    const ids = line.dataset.o ? line.dataset.o.split(" ") : [];
    const colour = line.style.borderLeftColor;
    info.set(line, { ids, colour, graph: line.dataset.g, told: line.title.split("\n") });
    line.removeAttribute("title");
    line.tabIndex = ids.length ? 0 : -1;
    if (ids.length) line.style.setProperty("--c", colour);
    ids.forEach((id) => {
      if (!linesOf.has(id)) linesOf.set(id, []);
      linesOf.get(id).push(line);
    });
  });

  const open = () => panes.filter((pane) => !pane.classList.contains("off"));

  function lay() {
    box.style.gridTemplateColumns = open().map((pane) => `${pane.dataset.w}fr`).join(" ");
    drawWires();
  }

  function add(parent, tag, content) {
    const element = document.createElement(tag);
    element.textContent = content;
    parent.append(element);
  }

  // The line's text without its number.
  const codeOf = (line) => [...line.childNodes].slice(line.firstElementChild?.tagName === "I" ? 1 : 0)
    .map((part) => part.textContent).join("").trim();

  // The foot: what the line is, where it is from, and the reasons of the decisions about it.
  function tell(line) {
    if (!line) {
      what.innerHTML = still.what;
      why.innerHTML = still.why;
      why.style.borderLeftColor = still.colour;
      return;
    }
    const { told, colour } = info.get(line);
    what.textContent = why.textContent = "";
    why.style.borderLeftColor = colour;
    add(what, "b", line.dataset.t || codeOf(line));
    told.slice(0, 2).filter(Boolean).forEach((part) => add(what, "small", part));
    const reasons = told.length > 2 ? told.slice(2) : relatedReasons();
    reasons.forEach((part, i) => add(why, i ? "small" : "b", part));
  }

  // Nothing was decided about this line itself: tell what was decided about the buffers it became.
  function relatedReasons() {
    const others = lit.filter((line) => paneOf.get(line).dataset.p === "loops" && info.get(line).told[2]);
    const name = (line) => `${info.get(line).graph === "backward" ? "backward " : ""}${line.dataset.t}`;
    return others.slice(0, 4).map((line) => `${name(line)}: ${info.get(line).told[2]}`);
  }

  function light(line) {
    lit.forEach((other) => other.classList.remove("hot"));
    const hot = new Set(line ? [line] : []);
    if (line) info.get(line).ids.forEach((id) => linesOf.get(id).forEach((other) => hot.add(other)));
    lit = [...hot];
    lit.forEach((other) => other.classList.add("hot"));
    root.classList.toggle("lit", !!line);
    current = line;
    tell(line);
    drawWires();
  }

  function visible(line) {
    const rect = line.getBoundingClientRect(), frame = paneOf.get(line).getBoundingClientRect();
    return rect.height > 0 && rect.top >= frame.top + 24 && rect.bottom <= frame.bottom ? rect : null;
  }

  function textEnd(line, rect) {
    const range = document.createRange();
    range.selectNodeContents(line);
    const end = Math.max(rect.left, ...[...range.getClientRects()].map((part) => part.right));
    return Math.min(end + 5, rect.right);
  }

  // Curves between lit lines of neighbouring panes that share an operation, within forward or backward.
  function drawWires() {
    svg.textContent = "";
    const origin = box.getBoundingClientRect(), shown = open();
    const places = shown.map((pane) =>
      lit.filter((line) => paneOf.get(line) === pane).map((line) => [line, visible(line)]).filter(([, r]) => r));
    let left = 160;
    places.slice(0, -1).forEach((starts, i) => starts.forEach(([from, start]) => {
      const one = info.get(from), ids = new Set(one.ids), x1 = textEnd(from, start) - origin.left;
      places[i + 1].forEach(([to, end]) => {
        const other = info.get(to);
        if (left <= 0 || (one.graph && other.graph && one.graph !== other.graph)) return;
        if (!other.ids.some((id) => ids.has(id))) return;
        left -= 1;
        const x2 = end.left - origin.left, middle = (x1 + x2) / 2;
        const y1 = start.top + start.height / 2 - origin.top, y2 = end.top + end.height / 2 - origin.top;
        const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
        path.setAttribute("d", `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}`);
        path.setAttribute("stroke", other.colour);
        svg.append(path);
      });
    }));
  }

  // Scroll every pane to its first lit line that is no input; the line's own pane to the line.
  function bring(line) {
    open().forEach((pane) => {
      const here = lines.filter((other) => paneOf.get(other) === pane && other.classList.contains("hot"));
      const first = pane === paneOf.get(line) ? line : here.find((other) => !other.dataset.i) || here[0];
      if (!first || visible(first)) return;
      pane.scrollTop += first.getBoundingClientRect().top - pane.getBoundingClientRect().top - pane.clientHeight / 3;
    });
    drawWires();
  }

  function move(line, key) {
    const shown = open(), at = shown.indexOf(paneOf.get(line));
    const linked = (pane) => lines.filter((other) => paneOf.get(other) === pane && other.tabIndex === 0);
    let next;
    if (key === "ArrowUp" || key === "ArrowDown") {
      const own = linked(shown[at]);
      next = own[own.indexOf(line) + (key === "ArrowUp" ? -1 : 1)];
    } else {
      const pane = shown[at + (key === "ArrowLeft" ? -1 : 1)];
      next = pane && (lit.find((other) => paneOf.get(other) === pane) || linked(pane)[0]);
    }
    if (next) {
      pinned = null;
      next.focus();
    }
  }

  const lineAt = (event) => event.target.closest(".ln");
  box.addEventListener("mouseover", (event) => {
    const line = lineAt(event);
    if (line && !pinned && line !== current) light(line);
  });
  box.addEventListener("mouseleave", () => pinned || light(null));
  box.addEventListener("focusin", (event) => lineAt(event) && !pinned && light(lineAt(event)));
  box.addEventListener("click", (event) => {
    const line = lineAt(event);
    if (!line) return;
    pinned = pinned === line ? null : line;
    light(line);
    if (pinned) bring(line);
  });
  box.addEventListener("keydown", (event) => {
    const line = lineAt(event);
    if (!line) return;
    if (event.key === "Escape") {
      pinned = null;
      light(null);
    } else if (event.key === "Enter") {
      line.click();
    } else if (event.key.startsWith("Arrow")) {
      event.preventDefault();
      event.stopPropagation();
      move(line, event.key);
    }
  });
  panes.forEach((pane) => pane.addEventListener("scroll", drawWires));
  window.addEventListener("resize", drawWires);

  // The corridor: a room opens and closes its pane.
  all(".room").forEach((room) => {
    const pane = panes.find((other) => other.dataset.p === room.dataset.p);
    const show = (on) => {
      pane.classList.toggle("off", !on);
      room.setAttribute("aria-pressed", String(on));
    };
    show(room.classList.contains("on"));
    room.classList.remove("on");
    room.setAttribute("role", "button");
    room.tabIndex = 0;
    room.addEventListener("click", () => {
      show(pane.classList.contains("off"));
      lay();
    });
    room.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      event.stopPropagation();
      room.click();
    });
  });

  const bar = document.createElement("div"), filter = document.createElement("input");
  bar.className = "bar";
  filter.placeholder = "filter: relu, buf2, load …";
  filter.setAttribute("aria-label", "filter");
  bar.append(filter);
  add(bar, "span", "point at a line to follow it · click pins · arrows move · rooms above open and close panes");
  box.before(bar);
  filter.addEventListener("input", () => {
    const wanted = filter.value.toLowerCase();
    lines.forEach((line) => line.classList.toggle("gone", !line.textContent.toLowerCase().includes(wanted)));
    drawWires();
  });
  filter.addEventListener("keydown", (event) => event.stopPropagation()); // or the notebook takes the keys

  lay();
  // index.html#hover=relu opens with the first line that contains "relu" pinned.
  if (location.hash.startsWith("#hover=")) {
    const wanted = decodeURIComponent(location.hash.slice("#hover=".length));
    const line = lines.find((other) => other.textContent.includes(wanted) && info.get(other).ids.length);
    if (line) line.click();
  }
});
