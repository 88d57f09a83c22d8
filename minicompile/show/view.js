// Brings the linked view of a trace to life, from the data beside it. Views are found by class and marked once they
// are set up, so that an object shown twice works twice. Only lines in sight are in the document.
// A script may use `root.explorer`: lit() -> [[pane, line number], ...], lines(pane) -> texts, open(panes), pane names.
document.querySelectorAll(".mc.trace:not(.live)").forEach((root) => {
  const holder = root.querySelector('script[type="application/json"]');
  if (!holder) return;
  const data = JSON.parse(holder.textContent);
  const ROW = 19, SPARE = 12, MOST_OPEN = 4, BROUGHT = 1 / 3; // pixels a row, rows drawn out of sight
  const box = root.querySelector(".panes");
  const what = root.querySelector(".what"), why = root.querySelector(".why");
  const still = { what: what.innerHTML, why: why.innerHTML, colour: why.style.borderLeftColor };
  const litSets = new Uint8Array(data.sets.length);
  const slots = new Map(); // pane name -> what shows it, kept while it is closed
  let open = [], history = []; // names of open panes from left to right; the same, the latest last
  let current = null, pinned = null; // rows
  let wanted = "", matches = [], match = -1;

  function make(tag, className, content, parent) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (content !== undefined) element.textContent = content;
    if (parent) parent.append(element);
    return element;
  }

  // ---- the data: panes of rows; a row is a line or a headline

  const panes = new Map(data.panes.map((pane) => [pane.key, pane]));
  const rooms = [...root.querySelectorAll(".room")].filter((room) => panes.has(room.dataset.p));
  const setLines = data.sets.map((ids) =>
    [...new Set(ids.map((id) => data.operations[id]))].filter(Boolean).sort((a, b) => a - b));
  const linesOf = (row) => (row.place ? [row.place] : setLines[row.set]);
  const colourOf = (row) => data.lines[linesOf(row).at(-1) || 0][1] || "transparent";
  const isLit = (row) => row === current || litSets[row.set] === 1;

  // Below the kernels it is known which of their lines a line came from: others with its operations are weak.
  const apart = (a, b) => (a.below || b.below) && a.of && b.of && a.of !== b.of;
  // A line that only calls the one that did it is weak as well.
  const calls = (row) => row.key === "source" && current.key !== "source" && !setLines[current.set].includes(row.place);
  const isStrong = (row) => row === current || !(row.weak || apart(row, current) || calls(row));

  function rowsOf(key) {
    const pane = panes.get(key);
    if (pane.all) return pane;
    pane.all = [];
    pane.lines = [];
    for (const part of pane.sections) {
      if (part.title) pane.all.push({ head: part.title, part, key });
      const column = (name, i) => (part.rows[name] ? part.rows[name][i] : 0);
      const weak = new Set(part.weak);
      for (let i = 0; i < part.count; i++) {
        const of = part.of.length ? part.of[i] : key === "kernels" ? i + 1 : 0;
        pane.all.push({
          key, part, n: pane.lines.length, number: part.first === null ? "" : part.first + i,
          text: data.strings[column("text", i)], set: column("set", i), detail: column("detail", i),
          why: column("why", i), place: data.places[column("place", i)], weak: weak.has(i), last: i === part.count - 1,
          of: of && `${part.graph} ${part.title.split(" ")[0]} ${of}`, below: part.of.length > 0,
        });
        pane.lines.push(pane.all.at(-1));
      }
    }
    pane.digits = Math.max(0, ...pane.lines.map((row) => String(row.number).length));
    pane.longest = pane.lines.reduce((most, row) => Math.max(most, row.text.length), 0);
    sift(pane);
    return pane;
  }

  // The filter: which rows of a pane are shown, and where.
  function sift(pane) {
    const keep = (row) => !row.head && row.text.toLowerCase().includes(wanted);
    const parts = wanted && new Set(pane.lines.filter(keep).map((row) => row.part));
    pane.shown = wanted ? pane.all.filter((row) => (row.head ? parts.has(row.part) : keep(row))) : pane.all;
    pane.all.forEach((row) => { row.at = -1; });
    pane.shown.forEach((row, i) => { row.at = i; });
    pane.left = pane.shown.filter((row) => !row.head).length;
  }

  // ---- drawing

  const patterns = {};
  for (const [language, source] of Object.entries(data.syntax)) patterns[language] = new RegExp(source, "gm");

  function colourCode(element, row) {
    const pattern = patterns[row.part.language];
    let position = 0;
    for (const found of pattern ? row.text.matchAll(pattern) : []) {
      const kind = Object.keys(found.groups).find((name) => found.groups[name] !== undefined);
      if (!kind) continue;
      element.append(row.text.slice(position, found.index));
      make("span", kind.replace(/\d+$/, ""), found[0], element);
      position = found.index + found[0].length;
    }
    element.append(row.text.slice(position));
  }

  function element(row, slot) {
    const line = make("span", row.head ? `row hd${row.head === row.part.graph ? " graph" : ""}` : "row ln");
    line.style.top = `${row.at * ROW}px`;
    if (row.part.framed) line.classList.add("framed", row.last ? "last" : "in");
    if (row.head) {
      make("b", "", row.head, line);
      return line;
    }
    line.dataset.n = row.n;
    line.tabIndex = -1;
    line.style.setProperty("--c", colourOf(row));
    make("i", "", String(row.number).padStart(slot.pane.digits), line);
    colourCode(line, row);
    mark(row, line);
    return line;
  }

  function mark(row, line) {
    if (row.head) return;
    const lit = isLit(row);
    line.classList.toggle("hot", lit && isStrong(row));
    line.classList.toggle("warm", lit && !isStrong(row));
    line.classList.toggle("pinned", row === pinned);
    line.classList.toggle("found", match >= 0 && matches[match] === row);
  }

  function draw(slot) {
    const { view, body, drawn, pane } = slot, height = view.clientHeight || 620;
    const first = Math.max(0, Math.floor(view.scrollTop / ROW) - SPARE);
    const last = Math.min(pane.shown.length, Math.ceil((view.scrollTop + height) / ROW) + SPARE);
    for (const [row, line] of drawn) {
      if ((row.at >= first && row.at < last) || line === document.activeElement) continue;
      line.remove();
      drawn.delete(row);
    }
    let after = null;
    for (let i = last - 1; i >= first; i--) {
      const row = pane.shown[i];
      if (!drawn.has(row)) {
        drawn.set(row, element(row, slot));
        body.insertBefore(drawn.get(row), after);
      }
      after = drawn.get(row);
    }
    say(slot);
    const stops = [...drawn].filter(([row]) => row.set); // one line of a pane can be reached with the tab key
    if (stops.length && !stops.some(([, line]) => line.tabIndex === 0)) stops[0][1].tabIndex = 0;
  }

  // What stands at the right of a pane's title: how much is lit or left, or the headline scrolled past.
  function say(slot) {
    const { pane, view } = slot, top = pane.shown[Math.floor(view.scrollTop / ROW)];
    const left = wanted && `${pane.left} of ${pane.lines.length} lines`;
    slot.about.textContent = slot.lit ? `${slot.lit} lit` : left || (view.scrollTop && top?.part.title) || pane.about;
  }

  function redraw(slot) {
    slot.drawn.clear();
    slot.body.textContent = "";
    slot.body.style.height = `${slot.pane.shown.length * ROW}px`;
    draw(slot);
  }

  // Where the lit lines of a pane are, in sight or not: marks beside the scroll bar, a count above.
  function drawTicks(slot) {
    const { ticks, pane, view } = slot, height = view.clientHeight, all = pane.shown.length * ROW;
    const lit = current ? pane.shown.filter((row) => !row.head && isLit(row)) : [];
    slot.lit = lit.length;
    say(slot);
    ticks.height = height;
    const brush = ticks.getContext("2d");
    if (!brush || all <= height) return;
    for (const row of lit) {
      brush.globalAlpha = isStrong(row) ? 1 : 0.3;
      brush.fillStyle = colourOf(row);
      brush.fillRect(0, Math.min((row.at / pane.shown.length) * height, height - 2), 6, 2);
    }
  }

  function makeSlot(key) {
    const pane = rowsOf(key), outer = make("div", "pane"), title = make("h4", "", undefined, outer);
    const menu = make("select", "", undefined, title), about = make("span", "", pane.about, title);
    const frame = make("div", "frame", undefined, outer), view = make("div", "view", undefined, frame);
    const body = make("div", "rows", undefined, view), ticks = make("canvas", "ticks", undefined, frame);
    const slot = { key, pane, outer, view, body, ticks, about, menu, drawn: new Map(), top: 0 };
    outer.dataset.p = key;
    ticks.width = 6;
    menu.setAttribute("aria-label", "stage in this pane");
    for (const other of panes.values()) make("option", "", other.title, menu).value = other.key;
    menu.value = key;
    body.style.width = `calc(${pane.longest + pane.digits}ch + 34px)`;
    view.addEventListener("scroll", () => {
      slot.top = view.scrollTop;
      draw(slot);
      drawWires();
    });
    ticks.addEventListener("click", (event) => {
      view.scrollTop = (event.offsetY / view.clientHeight) * pane.shown.length * ROW - view.clientHeight / 2;
    });
    menu.addEventListener("change", () => {
      const next = open.map((name) => (name === key ? menu.value : name === menu.value ? key : name));
      menu.value = key;
      show(next);
    });
    redraw(slot);
    watch?.observe(view);
    return slot;
  }

  // Opens panes, from left to right; those that stay keep their place.
  function show(names) {
    history = [...history.filter((name) => names.includes(name)), ...names.filter((name) => !history.includes(name))];
    open = names;
    names.forEach((name) => slots.has(name) || slots.set(name, makeSlot(name)));
    box.replaceChildren(...shown().map((slot) => slot.outer), svg);
    box.style.gridTemplateColumns = shown().map((slot) => `minmax(0,${slot.pane.width}fr)`).join(" ");
    shown().forEach((slot) => { slot.view.scrollTop = slot.top; });
    rooms.forEach((room) => room.setAttribute("aria-pressed", String(open.includes(room.dataset.p))));
    paint();
  }

  const shown = () => open.map((name) => slots.get(name));
  const slotOf = (row) => slots.get(row.key);
  function toggle(key) {
    if (open.includes(key)) return open.length > 1 && show(open.filter((name) => name !== key));
    const oldest = open.length < MOST_OPEN ? null : history[0], order = [...panes.keys()];
    const kept = open.filter((name) => name !== oldest);
    const at = kept.findIndex((name) => order.indexOf(name) > order.indexOf(key));
    return show(kept.toSpliced(at < 0 ? kept.length : at, 0, key));
  }

  // ---- lighting

  function paint() {
    shown().forEach((slot) => {
      draw(slot);
      slot.drawn.forEach((line, row) => mark(row, line));
      drawTicks(slot);
    });
    drawWires();
  }

  function light(row) {
    current = row;
    const ids = new Set(row ? data.sets[row.set] : []);
    data.sets.forEach((set, i) => { litSets[i] = set.some((id) => ids.has(id)) ? 1 : 0; });
    root.classList.toggle("lit", !!row);
    tell(row);
    paint();
  }

  function pin(row) {
    pinned = row;
    light(row);
    if (row) bring(row);
  }

  // The foot: what the line is, where it is from, and the reasons of the decisions about it.
  function tell(row) {
    what.innerHTML = row ? "" : still.what;
    why.innerHTML = row ? "" : still.why;
    why.style.borderLeftColor = row ? colourOf(row) : still.colour;
    if (!row) return;
    make("b", "", row.text.trim(), what);
    const from = linesOf(row).map((line) => data.lines[line][0]);
    if (row.detail) make("small", "", data.strings[row.detail], what);
    if (from.length) make("small", "", `from ${from.join("; ")}`, what);
    const own = data.whys[row.why].map((reason) => data.strings[reason]);
    (own.length ? own : related()).forEach((part, i) => make(i ? "small" : "b", "", part, why));
  }

  // Nothing was decided about this line itself: what was decided about the buffers that it became.
  function related() {
    if (!panes.has("loops")) return [];
    const others = rowsOf("loops").lines.filter((row) => isLit(row) && row.why);
    const name = (row) => `${row.part.graph === "backward" ? "backward " : ""}${row.text.split(/[[ ]/)[0]}`;
    const told = others.slice(0, 4).map((row) => `${name(row)}: ${data.strings[data.whys[row.why][0]]}`);
    return others.length > 4 ? [...told, `and ${others.length - 4} more buffers: point at them in the loops`] : told;
  }

  // ---- curves between lit lines of neighbouring panes that share one of the operations, within a graph

  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.classList.add("wires");
  svg.setAttribute("aria-hidden", "true");

  function ends(slot, origin) {
    const frame = slot.view.getBoundingClientRect(), left = frame.left - origin.left, top = frame.top - origin.top;
    const lit = [...slot.drawn].filter(([row]) => !row.head && isLit(row));
    const strong = lit.filter(([row]) => isStrong(row));
    return (strong.length ? strong : lit).flatMap(([row, line]) => {
      const y = (row.at + 0.5) * ROW - slot.view.scrollTop;
      if (y < 4 || y > frame.height - 4) return [];
      const range = document.createRange();
      range.selectNodeContents(line);
      const end = Math.max(0, ...[...range.getClientRects()].map((part) => part.right)) - origin.left + 5;
      return [{ row, y: y + top, from: Math.min(Math.max(end, left + 8), left + frame.width), to: left }];
    });
  }

  function drawWires() {
    svg.textContent = "";
    if (!current) return;
    const origin = box.getBoundingClientRect(), places = shown().map((slot) => ends(slot, origin));
    const asked = new Set(data.sets[current.set]), paths = new Map();
    let count = 0;
    places.slice(0, -1).forEach((starts, i) => starts.forEach((a) => {
      const ids = new Set(data.sets[a.row.set].filter((id) => asked.has(id)));
      places[i + 1].forEach((b) => {
        const [one, other] = [a.row.part.graph, b.row.part.graph], middle = (a.from + b.to) / 2;
        if ((one && other && one !== other) || apart(a.row, b.row) || !data.sets[b.row.set].some((id) => ids.has(id))) return;
        count += 1;
        const curve = `M${a.from},${a.y} C${middle},${a.y} ${middle},${b.y} ${b.to},${b.y}`;
        paths.set(colourOf(b.row), (paths.get(colourOf(b.row)) || "") + curve);
      });
    }));
    svg.style.opacity = count > 100 ? 0.4 : count > 30 ? 0.6 : 1;
    paths.forEach((curves, colour) => {
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", curves);
      path.setAttribute("stroke", colour);
      svg.append(path);
    });
  }

  // ---- moving

  function reveal(row) {
    const { view } = slotOf(row), top = row.at * ROW;
    if (row.at < 0 || (top >= view.scrollTop && top + ROW <= view.scrollTop + view.clientHeight)) return;
    view.scrollTop = slotOf(row).top = top - view.clientHeight * BROUGHT;
    draw(slotOf(row));
  }

  const linked = (slot) => slot.pane.shown.filter((row) => !row.head && row.set);
  const firstLit = (rows) => rows.find((row) => isLit(row) && isStrong(row)) || rows.find(isLit);

  // Scrolls every pane to its first lit line that computes; the line's own pane to the line.
  function bring(row) {
    shown().forEach((slot) => {
      const first = slot.key === row.key ? row : firstLit(linked(slot));
      if (first) reveal(first);
    });
    drawWires();
  }

  function move(row, key) {
    const at = open.indexOf(row.key), own = linked(slotOf(row));
    let next;
    if (key === "ArrowUp") next = own.findLast((other) => other.at < row.at);
    else if (key === "ArrowDown") next = own.find((other) => other.at > row.at);
    else {
      const side = shown()[at + (key === "ArrowLeft" ? -1 : 1)];
      next = side && (firstLit(linked(side)) || linked(side)[0]);
    }
    if (!next) return;
    pinned = null;
    reveal(next);
    slotOf(next).drawn.get(next).focus({ preventScroll: true });
    if (current !== next) light(next);
  }

  function taken(event, act) {
    event.preventDefault();
    event.stopPropagation();
    act();
  }

  function rowAt(event) {
    const line = event.target.closest(".ln");
    return line && rowsOf(line.closest(".pane").dataset.p).lines[line.dataset.n];
  }

  box.addEventListener("mouseover", (event) => {
    const row = rowAt(event);
    if (row && !pinned && row !== current) light(row);
  });
  box.addEventListener("mouseleave", () => pinned || light(null));
  box.addEventListener("focusin", (event) => {
    const row = rowAt(event);
    if (!row) return;
    slotOf(row).drawn.forEach((line, other) => { if (!other.head) line.tabIndex = other === row ? 0 : -1; });
    if (!pinned) light(row);
  });
  box.addEventListener("click", (event) => {
    const row = rowAt(event);
    if (row) pin(pinned === row ? null : row);
  });
  root.addEventListener("keydown", (event) => {
    const row = rowAt(event), { key } = event;
    if (key === "Escape") taken(event, () => pin(null));
    else if (row && key === "Enter") taken(event, () => pin(pinned === row ? null : row));
    else if (row && key.startsWith("Arrow")) taken(event, () => move(row, key));
  });

  // ---- the bar above the panes: search jumps, the filter hides

  const bar = make("div", "bar"), search = make("input", "", undefined, bar), hits = make("em", "", "", bar);
  const filter = make("input", "", undefined, bar);
  make("span", "", "point at a line to follow it · click pins, Esc lets go · arrows move · Enter: next found", bar);
  search.placeholder = "search: relu, buf2 …";
  filter.placeholder = "filter: show only …";
  search.setAttribute("aria-label", "search");
  filter.setAttribute("aria-label", "filter");
  [search, filter].forEach((input) => { input.type = "search"; });
  hits.setAttribute("aria-live", "polite");

  function find() {
    const text = search.value.toLowerCase();
    matches = text ? shown().flatMap((slot) =>
      slot.pane.shown.filter((row) => !row.head && row.text.toLowerCase().includes(text))) : [];
    match = -1;
    hits.textContent = text ? `${matches.length} found` : "";
    paint();
  }

  function jump(by) {
    if (matches.some((row) => row.at < 0 || !open.includes(row.key))) find();
    if (!matches.length) return;
    match = match < 0 && by < 0 ? matches.length - 1 : (match + by + matches.length) % matches.length;
    pin(matches[match]);
    hits.textContent = `${match + 1} of ${matches.length}`;
  }

  search.addEventListener("input", find);
  search.addEventListener("keydown", (event) => event.key === "Enter" && jump(event.shiftKey ? -1 : 1));
  filter.addEventListener("input", () => {
    wanted = filter.value.toLowerCase();
    panes.forEach((pane) => pane.all && sift(pane));
    slots.forEach(redraw);
    find();
  });
  // Or the notebook takes the keys: D, D deletes a cell. What is pressed with Ctrl stays its own: saving.
  bar.setAttribute("data-lm-suppress-shortcuts", "true");
  root.addEventListener("keydown", (event) => event.ctrlKey || event.metaKey || event.stopPropagation());

  rooms.forEach((room) => {
    room.classList.remove("on");
    room.setAttribute("role", "button");
    room.tabIndex = 0;
    const act = () => toggle(room.dataset.p);
    room.addEventListener("click", act);
    room.addEventListener("keydown", (event) => [" ", "Enter"].includes(event.key) && taken(event, act));
  });

  // A notebook may lay its outputs out late, or again.
  const watch = window.ResizeObserver && new ResizeObserver(() => {
    shown().forEach((slot) => { if (slot.view.scrollTop !== slot.top) slot.view.scrollTop = slot.top; });
    paint();
  });

  root.classList.add("live");
  root.style.setProperty("--row", `${ROW}px`);
  box.before(bar);
  box.textContent = "";
  show(data.open);
  root.explorer = {
    lit: () => (current ? [...panes.keys()].flatMap((key) =>
      rowsOf(key).lines.filter(isLit).map((row) => [key, row.n])) : []),
    lines: (key) => rowsOf(key).lines.map((row) => row.text),
    open: show,
  };
  // index.html#hover=relu opens with the first line that contains "relu" pinned.
  if (location.hash.startsWith("#hover=")) {
    const text = decodeURIComponent(location.hash.slice("#hover=".length));
    const row = shown().flatMap(linked).find((other) => other.text.includes(text));
    if (row) pin(row);
  }
});
