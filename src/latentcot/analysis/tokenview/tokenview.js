"use strict";

/* LatentTokenView: the tokens of a text, coloured by the latent steps spent on each.
 *
 *   const handle = LatentTokenView.mount(element, textView, { onSelect });
 *   handle.update(otherTextView);
 *
 * `textView` is what `TextView.as_dict()` gives in Python; its field names are used unchanged.
 * `onSelect(index, token)` is called on a click, on Enter and on the space bar. Hovering, tapping
 * or focusing a token shows its steps; the arrow keys, Home and End move, Escape hides.
 *
 * A text is untrusted: it reaches the page through `textContent` alone, each token is isolated
 * from the direction of its neighbours, and invisible characters are spelled out.
 */
globalThis.LatentTokenView = (() => {
  // Lightness rises or falls monotonically along each scale, so order survives any colour vision
  // and a grey print. Few steps are close to the page, many steps stand out.
  const SCALES = {
    light: ["#f6f7ea", "#dcefc0", "#aedfbb", "#74c6c2", "#439fc4", "#2f6fb0"],
    dark: ["#1d2533", "#223f66", "#256087", "#3186a0", "#58ada6", "#a3d8a2"],
  };
  const INVISIBLE = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/u;
  const MARKS = { "\n": "↵", "\t": "⇥" };
  const COLUMNS = [
    ["gate", "gates"],
    ["reach", "reach"],
    ["exit", "exits"],
    ["p(next)", "p_target"],
  ];
  const GAP = 6; // pixels between a token and its panel
  let mounted = 0;

  function create(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  // ---- colours ---------------------------------------------------------------------------------

  function channels(hex) {
    return [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
  }

  function interpolate(stops, fraction) {
    const place = fraction * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2);
    const from = channels(stops[low]);
    const to = channels(stops[low + 1]);
    return from.map((value, i) => Math.round(value + (to[i] - value) * (place - low)));
  }

  // Relative luminance of WCAG 2; black and white are equally legible at 0.179.
  function inkOn(rgb) {
    const linear = rgb.map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    return luminance > 0.179 ? "#000" : "#fff";
  }

  function levelColours(level, maxLevel) {
    const fraction = maxLevel ? level / maxLevel : 0;
    const [light, dark] = [SCALES.light, SCALES.dark].map((stops) => interpolate(stops, fraction));
    return {
      background: `light-dark(rgb(${light}), rgb(${dark}))`,
      ink: `light-dark(${inkOn(light)}, ${inkOn(dark)})`,
    };
  }

  function paint(node, colours) {
    node.style.backgroundColor = colours.background;
    node.style.color = colours.ink;
  }

  // ---- text ------------------------------------------------------------------------------------

  function escapeName(char) {
    return `⟨U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
  }

  /* Appends `text` to `node`: line breaks and tabs with a faint mark, invisible characters (which
     include all that change the writing direction) by name. */
  function appendVisible(node, text) {
    let plain = "";
    const flush = (mark) => {
      node.append(plain, mark);
      plain = "";
    };
    for (const char of text) {
      if (char in MARKS) {
        flush(create("span", "lt-mark", MARKS[char]));
        plain = char;
      } else if (INVISIBLE.test(char)) {
        flush(create("span", "lt-escape", escapeName(char)));
      } else {
        plain += char;
      }
    }
    node.append(plain);
    if (!text) node.append(create("span", "lt-mark", "∅"));
  }

  /* The same on one line, for running text and labels; spaces at the ends are marked. */
  function oneLine(text) {
    const visible = (char) => MARKS[char] ?? (INVISIBLE.test(char) ? escapeName(char) : char);
    const marked = text.replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
    return Array.from(marked, visible).join("") || "∅";
  }

  function plural(count, noun) {
    return `${count} ${noun}${count === 1 ? "" : "s"}`;
  }

  function probability(value) {
    return value >= 0.001 || value === 0 ? value.toFixed(3) : value.toExponential(0);
  }

  function isNumber(value) {
    return typeof value === "number";
  }

  // ---- parts -----------------------------------------------------------------------------------

  function legend(view) {
    const list = create("ul", "lt-legend");
    if (view.max_latent_steps === 0) {
      list.append(create("li", "", "No latent steps: one pass per token."));
      return list;
    }
    list.append(create("li", "", "Latent steps before the next token (share of tokens):"));
    for (let level = 0; level <= view.max_latent_steps; level++) {
      const count = view.tokens.filter((token) => token.latent_steps === level).length;
      const swatch = create("span", "lt-swatch", String(level));
      paint(swatch, levelColours(level, view.max_latent_steps));
      const item = create("li");
      item.append(swatch, `${Math.round((100 * count) / Math.max(view.tokens.length, 1))}%`);
      list.append(item);
    }
    return list;
  }

  function tokenNodes(view) {
    const palette = Array.from({ length: view.max_latent_steps + 1 }, (_, level) =>
      levelColours(level, view.max_latent_steps),
    );
    return view.tokens.map((token, index) => {
      const node = create("span", "lt-token");
      node.setAttribute("role", "option");
      node.setAttribute("aria-selected", "false");
      node.tabIndex = index === 0 ? 0 : -1;
      node.dataset.index = index;
      paint(node, palette[token.latent_steps]);
      appendVisible(node, token.text);
      return node;
    });
  }

  function valueCell(value) {
    const cell = create("td", "", isNumber(value) ? probability(value) : "–");
    if (isNumber(value)) cell.style.setProperty("--lt-value", value);
    return cell;
  }

  function headCell(scope, text) {
    const cell = create("th", "", text);
    cell.scope = scope;
    return cell;
  }

  /* One row per executed pass; then what the model put out, known from the next token's loss. */
  function stepsTable(token, nextLoss) {
    const columns = COLUMNS.filter(([, field]) => token[field]?.length);
    const table = create("table", "lt-steps");
    const addRow = (name, cells) => body.insertRow().append(headCell("row", name), ...cells);
    table.createTHead().insertRow().append(
      headCell("col", "pass"),
      ...columns.map(([name]) => headCell("col", name)),
    );
    const body = table.createTBody();
    for (let step = 0; step <= token.latent_steps; step++) {
      addRow(String(step + 1), columns.map(([, field]) => valueCell(token[field][step])));
    }
    if (isNumber(nextLoss) && columns.at(-1)?.[1] === "p_target") {
      const blanks = columns.slice(1).map(() => create("th"));
      addRow("output", [...blanks, valueCell(Math.exp(-nextLoss))]);
    }
    return table;
  }

  function sentence(before, quoted, after = "") {
    const line = create("p");
    line.append(before, create("span", "lt-quote", oneLine(quoted)), after);
    return line;
  }

  function stepsSummary(token, view) {
    const loss = isNumber(token.loss) ? `, loss ${token.loss.toFixed(3)} nats` : "";
    return `${plural(token.latent_steps, "latent step")} of at most ${view.max_latent_steps}${loss}`;
  }

  function panelContent(view, index) {
    const token = view.tokens[index];
    const content = [
      sentence("", token.text, ` id ${token.token_id}`),
      create("p", "lt-note", stepsSummary(token, view)),
    ];
    if (typeof token.target === "string") content.push(sentence("predicts: ", token.target));
    content.push(stepsTable(token, view.tokens[index + 1]?.loss));
    return content;
  }

  // ---- places ----------------------------------------------------------------------------------

  function firstBox(node) {
    return Array.from(node.getClientRects()).find((box) => box.width > 0)
      ?? node.getBoundingClientRect();
  }

  /* The token nearest above (direction -1) or below (+1), or the same one at an edge. */
  function verticalNeighbour(nodes, index, direction) {
    const start = firstBox(nodes[index]);
    const sameLine = (a, b) => Math.abs(a.top - b.top) < start.height / 2;
    let best = { index, distance: Infinity, box: null };
    for (let i = index + direction; nodes[i]; i += direction) {
      const box = firstBox(nodes[i]);
      if (sameLine(box, start)) continue;
      if (best.box && !sameLine(box, best.box)) break;
      const distance = Math.abs(box.left - start.left);
      if (distance < best.distance) best = { index: i, distance, box };
    }
    return best.index;
  }

  /* Puts the panel under the token's first line, or above where only there is room. Narrow screens
     dock it instead, in the style sheet. */
  function place(panel, root, node) {
    const frame = root.getBoundingClientRect();
    const box = firstBox(node);
    const { width, height } = panel.getBoundingClientRect();
    const above = box.bottom + GAP + height > innerHeight && box.top - GAP - height >= 0;
    const left = Math.max(0, Math.min(box.left - frame.left, frame.width - width));
    const top = above ? box.top - frame.top - GAP - height : box.bottom - frame.top + GAP;
    panel.style.setProperty("--lt-x", `${left}px`);
    panel.style.setProperty("--lt-y", `${top}px`);
  }

  // ---- the component ---------------------------------------------------------------------------

  function mount(element, textView, { onSelect } = {}) {
    const root = create("div", "lt-root");
    const text = create("div", "lt-text");
    const panel = create("div", "lt-panel");
    panel.id = `lt-panel-${++mounted}`;
    panel.setAttribute("role", "tooltip");
    text.setAttribute("role", "listbox");
    text.setAttribute("aria-orientation", "horizontal");
    let view;
    let nodes;
    let active; // index of the token that the Tab key reaches

    const indexOf = (target) => {
      const node = target.closest?.(".lt-token");
      return node ? Number(node.dataset.index) : null;
    };

    const show = (index) => {
      panel.replaceChildren(...panelContent(view, index));
      panel.hidden = false;
      place(panel, root, nodes[index]);
    };

    const showFocused = () => {
      const index = indexOf(document.activeElement);
      if (index !== null && text.contains(document.activeElement)) show(index);
      else panel.hidden = true;
    };

    const activate = (index) => {
      nodes[active].tabIndex = -1;
      nodes[index].tabIndex = 0;
      nodes[index].setAttribute("aria-describedby", panel.id);
      nodes[index].setAttribute(
        "aria-label",
        `${oneLine(view.tokens[index].text)}: ${stepsSummary(view.tokens[index], view)}`,
      );
      active = index;
      show(index);
    };

    const select = (index) => {
      text.querySelector('[aria-selected="true"]')?.setAttribute("aria-selected", "false");
      nodes[index].setAttribute("aria-selected", "true");
      onSelect?.(index, view.tokens[index]);
    };

    const moves = {
      ArrowLeft: (index) => Math.max(index - 1, 0),
      ArrowRight: (index) => Math.min(index + 1, nodes.length - 1),
      ArrowUp: (index) => verticalNeighbour(nodes, index, -1),
      ArrowDown: (index) => verticalNeighbour(nodes, index, 1),
      Home: () => 0,
      End: () => nodes.length - 1,
      Enter: (index) => (select(index), index),
      " ": (index) => (select(index), index),
    };

    text.addEventListener("pointerover", (event) => {
      const index = indexOf(event.target);
      if (index !== null) show(index);
    });
    text.addEventListener("pointerleave", showFocused);
    text.addEventListener("focusin", (event) => activate(indexOf(event.target)));
    text.addEventListener("focusout", () => (panel.hidden = true));
    text.addEventListener("click", (event) => {
      const index = indexOf(event.target);
      if (index !== null) select(index);
    });
    text.addEventListener("keydown", (event) => {
      if (event.key === "Escape") panel.hidden = true;
      if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in moves)) return;
      event.preventDefault();
      nodes[moves[event.key](active)].focus();
    });

    /* Shows another text view; a focused position keeps its focus while the text reaches it. */
    function update(nextView) {
      const focused = text.contains(document.activeElement) ? active : null;
      view = nextView;
      nodes = tokenNodes(view);
      active = 0;
      panel.hidden = true;
      text.setAttribute("aria-label", `Tokens of ${oneLine(view.title)}`);
      text.replaceChildren();
      for (const node of nodes) text.append(node);
      root.replaceChildren(legend(view), text, panel);
      if (focused !== null) nodes[focused]?.focus();
    }

    update(textView);
    element.replaceChildren(root);
    return { update };
  }

  return { mount };
})();
