// Charts on a canvas. `Plot` is what all have: a card, hover, zoom, PNG and CSV; what is drawn is said by the others.
"use strict";

(function () {
  const g = gradwire;
  const DRAG = 6; // pixels, from which on it is no click
  const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", "DejaVu Sans", sans-serif';
  const all = new Set();

  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  class Plot {
    constructor({ id, title, note = "", height = 240, half = true, controls = [] }) {
      this.id = id;
      this.title = title;
      this.height = height;
      this.zoom = null; // [from, to] on the x axis
      this.hidden = new Set(); // names that were switched off in the legend
      this.pointer = null; // {x, y} in pixels of the plot
      this.drag = null; // where it began, in pixels
      this.onzoom = () => {};
      this._build(note, half, controls);
      all.add(this);
    }

    _build(note, half, controls) {
      const e = g.element;
      this.noteElement = e("small", {}, note);
      this.canvas = e("canvas", { tabindex: 0, role: "img", "aria-label": this.title });
      this.tip = e("div", { class: "tip", hidden: true });
      this.legendElement = e("ul", { class: "legend" });
      const buttons = e("span", { class: "buttons" },
        e("button", { type: "button", class: "png", title: "Save as a picture", onclick: () => this.savePng() }, "PNG"),
        e("button", { type: "button", class: "csv", title: "Save what is plotted", onclick: () => this.saveCsv() }, "CSV"));
      this.plotElement = e("div", { class: "plot" }, this.canvas, this.tip);
      this.element = e("section", { class: half ? "card half" : "card", id: this.id },
        e("header", {}, e("h2", {}, this.title, this.noteElement), ...controls, buttons), this.plotElement, this.legendElement);
      this._listen();
      new ResizeObserver(() => this.redraw()).observe(this.plotElement);
    }

    set note(text) {
      if (this.noteElement.textContent !== text) this.noteElement.textContent = text;
    }

    _listen() {
      const canvas = this.canvas;
      canvas.addEventListener("pointerdown", (event) => {
        if (event.button !== 0) return;
        this.drag = this._at(event).x;
        canvas.setPointerCapture(event.pointerId);
      });
      canvas.addEventListener("pointermove", (event) => {
        this.pointer = this._at(event);
        this.redraw();
      });
      canvas.addEventListener("pointerup", (event) => {
        const from = this.drag, to = this._at(event).x;
        this.drag = null;
        if (from !== null && Math.abs(to - from) > DRAG) this.zoomTo(this.xOf(Math.min(from, to)), this.xOf(Math.max(from, to)));
        this.redraw();
      });
      canvas.addEventListener("pointerleave", () => this._leave());
      canvas.addEventListener("pointercancel", () => this._leave());
      canvas.addEventListener("blur", () => this._leave());
      canvas.addEventListener("dblclick", () => this.zoomTo(null));
      canvas.addEventListener("keydown", (event) => this._key(event));
    }

    _leave() {
      this.pointer = this.drag = null;
      this.redraw();
    }

    _at(event) {
      const box = this.canvas.getBoundingClientRect();
      return { x: event.clientX - box.left, y: event.clientY - box.top };
    }

    _key(event) {
      const area = this.area;
      if (!area) return;
      const at = this.pointer ? this.pointer.x : area.left + area.width / 2;
      const move = (by) => (this.pointer = { x: Math.min(area.left + area.width, Math.max(area.left, at + by)), y: this.pointer ? this.pointer.y : area.top + 10 });
      const scale = (factor) => {
        const [low, high] = this.domain(), middle = this.xOf(at);
        this.zoomTo(middle - (middle - low) * factor, middle + (high - middle) * factor);
      };
      if (event.key === "ArrowLeft") move(-area.width / 100);
      else if (event.key === "ArrowRight") move(area.width / 100);
      else if (event.key === "+" || event.key === "=") scale(0.5);
      else if (event.key === "-") scale(2);
      else if (event.key === "Escape" || event.key === "0") this.zoomTo(null);
      else return;
      event.preventDefault();
      this.redraw();
    }

    zoomTo(from, to) {
      const [low, high] = this.extent();
      const before = JSON.stringify(this.zoom);
      if (from === null || (from <= low && to >= high)) this.zoom = null;
      else this.zoom = [Math.max(from, low), Math.min(to, high)];
      if (JSON.stringify(this.zoom) !== before) this.onzoom(this.zoom);
      this.redraw();
    }

    domain() {
      return this.zoom || this.extent();
    }

    xOf(pixel) {
      const [low, high] = this.domain();
      return low + ((pixel - this.area.left) / this.area.width) * (high - low);
    }

    pixelOf(x) {
      const [low, high] = this.domain();
      return this.area.left + ((x - low) / (high - low || 1)) * this.area.width;
    }

    redraw() {
      if (this._waiting) return;
      this._waiting = true;
      requestAnimationFrame(() => {
        this._waiting = false;
        this._draw();
      });
    }

    plotHeight() {
      return this.height;
    }

    _draw() {
      const width = this.plotElement.clientWidth, height = this.plotHeight(), ratio = window.devicePixelRatio || 1;
      if (!width) return; // not shown
      const pixels = [Math.round(width * ratio), Math.round(height * ratio)];
      if (this.canvas.width !== pixels[0] || this.canvas.height !== pixels[1]) {
        [this.canvas.width, this.canvas.height] = pixels;
        this.canvas.style.height = `${height}px`;
      }
      const context = this.canvas.getContext("2d");
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, width, height);
      this.paint(context, width, height);
      this._paintPointer(context);
      this._showLegend();
      this.canvas.dataset.drawn = String(Number(this.canvas.dataset.drawn || 0) + 1);
    }

    _paintPointer(context) {
      const area = this.area, at = this.pointer;
      this.tip.hidden = true;
      if (!at || this.empty() || at.x < area.left - 1 || at.x > area.left + area.width + 1) return;
      if (this.drag !== null && Math.abs(at.x - this.drag) > DRAG) {
        context.globalAlpha = 0.16;
        context.fillStyle = ink("--accent");
        context.fillRect(Math.min(at.x, this.drag), area.top, Math.abs(at.x - this.drag), area.height);
        context.globalAlpha = 1;
        return;
      }
      const told = this.describe(at.x, at.y);
      if (!told) return;
      const x = Math.round(told.pixel) + 0.5;
      context.strokeStyle = ink("--muted");
      context.lineWidth = 1;
      context.setLineDash([3, 3]);
      context.beginPath();
      context.moveTo(x, area.top);
      context.lineTo(x, area.top + area.height);
      context.stroke();
      context.setLineDash([]);
      for (const dot of told.dots || []) {
        context.fillStyle = ink(dot.color);
        context.beginPath();
        context.arc(x, dot.y, 3.5, 0, 7);
        context.fill();
      }
      this._showTip(told, x, at.y);
    }

    _showTip(told, x, y) {
      const e = g.element;
      this.tip.replaceChildren(e("b", {}, told.title),
        e("table", {}, told.lines.map((line) => e("tr", {}, e("td", {}, line.color ? g.swatch(line.color) : null, line.name), e("td", {}, line.value)))));
      this.tip.hidden = false;
      const width = this.plotElement.clientWidth, own = this.tip.offsetWidth;
      const left = x + 14 + own <= width ? x + 14 : x - 14 - own;
      this.tip.style.left = `${Math.max(0, Math.min(left, width - own))}px`;
      this.tip.style.top = `${told.follow ? Math.max(0, y + 14) : 4}px`;
    }

    _showLegend() {
      const items = this.legend();
      const said = JSON.stringify([items, [...this.hidden]]);
      if (said === this._legendSaid) return;
      this._legendSaid = said;
      const focused = document.activeElement && this.legendElement.contains(document.activeElement) ? document.activeElement.dataset.name : null;
      this.legendElement.replaceChildren(...items.map((item) => g.element("li", {},
        g.element("button", { type: "button", "aria-pressed": String(!this.hidden.has(item.name)), "data-name": item.name, onclick: () => this._toggle(item.name) },
          g.swatch(item.color), g.element("span", { class: "name" }, item.name)))));
      if (focused !== null) for (const button of this.legendElement.querySelectorAll("button")) if (button.dataset.name === focused) button.focus();
    }

    _toggle(name) {
      if (!this.hidden.delete(name)) this.hidden.add(name);
      this.redraw();
    }

    // The same picture with a title and a legend, twice as fine.
    picture() {
      const width = Math.max(this.plotElement.clientWidth, 320), height = this.plotHeight(), scale = 2;
      const canvas = document.createElement("canvas");
      canvas.width = (width + 32) * scale;
      canvas.height = (height + 84) * scale;
      const context = canvas.getContext("2d");
      context.scale(scale, scale);
      context.fillStyle = ink("--surface");
      context.fillRect(0, 0, width + 32, height + 84);
      context.fillStyle = ink("--text");
      context.font = FONT.replace("12px", "600 14px");
      context.textBaseline = "alphabetic";
      context.textAlign = "left";
      context.fillText(this.title, 16, 28);
      context.save();
      context.translate(16, 42);
      this.paint(context, width, height);
      context.restore();
      let x = 16;
      context.font = FONT;
      context.textAlign = "left";
      context.textBaseline = "middle";
      for (const item of this.legend().filter((each) => !this.hidden.has(each.name))) {
        context.fillStyle = ink(item.color);
        context.fillRect(x, height + 58, 10, 10);
        context.fillStyle = ink("--muted");
        const name = item.name.length > 40 ? item.name.slice(0, 39) + "…" : item.name;
        context.fillText(name, x + 16, height + 63);
        x += 32 + context.measureText(name).width;
      }
      this.redraw(); // `paint` left the picture's measures behind
      return canvas;
    }

    savePng() {
      this.picture().toBlob((blob) => g.save(`gradwire-${this.id}.png`, blob), "image/png");
    }

    saveCsv() {
      g.save(`gradwire-${this.id}.csv`, new Blob([g.csv(this.rows())], { type: "text/csv" }));
    }

    // Axes and grid; sets `area`. `yTicks` may be null.
    paintFrame(context, width, height, { xKind, xName, yTicks, yPixel, left }) {
      context.font = FONT;
      const labels = yTicks ? yTicks.at.map((tick) => yTicks.text(tick)) : [];
      const room = left !== undefined ? left : Math.max(30, ...labels.map((each) => context.measureText(each).width)) + 10;
      this.area = { left: room, top: 8, width: Math.max(10, width - room - 10), height: Math.max(10, height - 8 - (xName ? 38 : 22)) };
      const area = this.area;
      context.lineWidth = 1;
      context.strokeStyle = ink("--grid");
      context.fillStyle = ink("--muted");
      context.textBaseline = "middle";
      context.textAlign = "right";
      if (yTicks) yTicks.at.forEach((tick, index) => {
        const y = Math.round(yPixel(tick, area)) + 0.5;
        context.beginPath();
        context.moveTo(area.left, y);
        context.lineTo(area.left + area.width, y);
        context.stroke();
        context.fillText(labels[index], area.left - 8, y);
      });
      const [low, high] = this.domain();
      let xs = g.ticks(xKind, low, high, Math.max(2, Math.floor(area.width / 80)));
      context.textBaseline = "top";
      context.textAlign = "center";
      for (const tick of xs.at) {
        const x = this.pixelOf(tick), text = xs.text(tick), half = context.measureText(text).width / 2;
        context.beginPath();
        context.moveTo(Math.round(x) + 0.5, area.top + area.height);
        context.lineTo(Math.round(x) + 0.5, area.top + area.height + 4);
        context.stroke();
        context.fillText(text, Math.min(Math.max(x, half), width - half), area.top + area.height + 7);
      }
      if (xName) context.fillText(xName, area.left + area.width / 2, area.top + area.height + 23);
      context.strokeStyle = ink("--line");
      context.beginPath();
      context.moveTo(area.left, area.top + area.height + 0.5);
      context.lineTo(area.left + area.width, area.top + area.height + 0.5);
      context.stroke();
    }

    paintNothing(context, width, height, text = "nothing yet") {
      this.area = { left: 0, top: 0, width, height };
      context.font = FONT;
      context.fillStyle = ink("--muted");
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(text, width / 2, height / 2);
    }
  }

  // Lines, stacked areas and points. Series: {name, color, x, y, style: "line" | "area" | "points"}.
  class Chart extends Plot {
    constructor(options) {
      super(options);
      this.y = options.y || { kind: "number" };
      this.x = { kind: "step", name: "step" };
      this.log = false;
      this.series = [];
    }

    set({ x, series }) {
      if (x && x.name !== this.x.name) this.zoom = null;
      this.x = x || this.x;
      this.series = series;
      this._stack();
      this.redraw();
    }

    setLog(log) {
      this.log = log;
      this.redraw();
    }

    // Areas lie on those before them.
    _stack() {
      let below = null;
      for (const each of this.series) {
        if (each.style !== "area") continue;
        each.below = below;
        each.top = each.y.map((value, i) => (g.known(value) ? value : 0) + (below ? below[i] || 0 : 0));
        below = each.top;
      }
    }

    shown() {
      return this.series.filter((each) => !this.hidden.has(each.name) || each.style === "area");
    }

    empty() {
      return !this.series.some((each) => each.x.length && each.y.some(g.known));
    }

    extent() {
      let low = Infinity, high = -Infinity;
      for (const each of this.series) {
        if (!each.x.length) continue;
        low = Math.min(low, each.x[0]);
        high = Math.max(high, each.x[each.x.length - 1]);
      }
      if (!(low <= high)) return [0, 1];
      return low === high ? [low - 0.5, high + 0.5] : [low, high];
    }

    _heights(each) {
      return each.style === "area" ? each.top : each.y;
    }

    _range() {
      const [from, to] = this.domain();
      let low = Infinity, high = -Infinity;
      for (const each of this.shown()) {
        const heights = this._heights(each);
        for (let i = 0; i < each.x.length; i++) {
          const inside = each.x[i] >= from && each.x[i] <= to;
          if (!inside || !g.known(heights[i]) || (this.log && heights[i] <= 0)) continue;
          if (heights[i] < low) low = heights[i];
          if (heights[i] > high) high = heights[i];
        }
      }
      if (!(low <= high)) return this.log ? [0.1, 1] : [0, 1];
      if (this.log) return low === high ? [low / 2, high * 2] : [low / 1.05, high * 1.05];
      if (this.y.zero) low = Math.min(0, low);
      const room = (high - low || Math.abs(high) || 1) * 0.06;
      return [this.y.zero && low === 0 ? 0 : low - room, high + room];
    }

    paint(context, width, height) {
      if (this.empty()) return this.paintNothing(context, width, height);
      const [low, high] = this._range();
      const scale = this.log ? (value) => Math.log(value / low) / Math.log(high / low) : (value) => (value - low) / (high - low || 1);
      const yPixel = (value, area) => area.top + area.height * (1 - scale(value));
      const wanted = Math.max(2, Math.floor(height / 38));
      const yTicks = this.log ? g.logTicks(this.y.kind, low, high, wanted) : g.ticks(this.y.kind, low, high, wanted);
      this.paintFrame(context, width, height, { xKind: this.x.kind, xName: this.x.name, yTicks, yPixel });
      this.yOf = (value) => yPixel(value, this.area);
      context.save();
      context.beginPath();
      context.rect(this.area.left, this.area.top - 3, this.area.width + 4, this.area.height + 4);
      context.clip();
      for (const each of this.shown()) this._paintSeries(context, each);
      context.restore();
    }

    _paintSeries(context, each) {
      const color = ink(each.color);
      context.strokeStyle = context.fillStyle = color;
      if (each.style === "points") return this._paintPoints(context, each);
      if (each.style === "area") this._paintArea(context, each);
      context.lineWidth = 1.5;
      context.lineJoin = "round";
      context.setLineDash(each.dash || []);
      this._trace(context, each.x, this._heights(each));
      context.stroke();
      context.setLineDash([]);
      if (each.x.length === 1 || each.dots) this._paintPoints(context, each);
    }

    _trace(context, xs, ys) {
      const [from, to] = this.domain();
      let drawing = false;
      context.beginPath();
      for (let i = 0; i < xs.length; i++) {
        if ((i + 1 < xs.length && xs[i + 1] < from) || (i > 0 && xs[i - 1] > to)) continue;
        if (!g.known(ys[i]) || (this.log && ys[i] <= 0)) {
          drawing = false;
          continue;
        }
        const x = this.pixelOf(xs[i]), y = this.yOf(ys[i]);
        if (drawing) context.lineTo(x, y);
        else context.moveTo(x, y);
        drawing = true;
      }
    }

    _paintArea(context, each) {
      const floor = this.area.top + this.area.height;
      context.globalAlpha = this.hidden.has(each.name) ? 0.05 : 0.32;
      context.beginPath();
      each.x.forEach((x, i) => context.lineTo(this.pixelOf(x), this.yOf(each.top[i])));
      for (let i = each.x.length - 1; i >= 0; i--) context.lineTo(this.pixelOf(each.x[i]), each.below ? this.yOf(each.below[i]) : floor);
      context.closePath();
      context.fill();
      context.globalAlpha = 1;
    }

    _paintPoints(context, each) {
      for (let i = 0; i < each.x.length; i++) {
        if (!g.known(each.y[i]) || (this.log && each.y[i] <= 0)) continue;
        context.beginPath();
        context.arc(this.pixelOf(each.x[i]), this.yOf(each.y[i]), each.dots ? 2.5 : 4, 0, 7);
        context.fill();
        if (each.style === "points") {
          context.strokeStyle = ink("--surface");
          context.lineWidth = 1.5;
          context.stroke();
        }
      }
    }

    describe(pixel) {
      const wanted = this.xOf(pixel);
      const [from, to] = this.domain();
      let nearest = null;
      for (const each of this.shown()) {
        const i = near(each, wanted);
        if (i === null || each.x[i] < from || each.x[i] > to) continue;
        if (nearest === null || Math.abs(each.x[i] - wanted) < Math.abs(nearest - wanted)) nearest = each.x[i];
      }
      if (nearest === null) return null;
      const lines = [], dots = [];
      const reach = ((to - from) / this.area.width) * 12;
      for (const each of this.shown()) {
        const i = near(each, nearest);
        if (i === null || Math.abs(each.x[i] - nearest) > reach) continue;
        lines.push({ name: each.name, color: each.color, value: g.value(this.y.kind, each.y[i]) });
        const height = this._heights(each)[i];
        if (!this.log || height > 0) dots.push({ color: each.color, y: this.yOf(height) });
      }
      return { pixel: this.pixelOf(nearest), title: `${this.x.name} ${g.value(this.x.kind, nearest)}`, lines, dots };
    }

    legend() {
      return this.series.map((each) => ({ name: each.name, color: each.color }));
    }

    // Everything that is plotted, also outside of the zoom: a line an x, a column a series.
    rows() {
      const found = new Map();
      this.series.forEach((each, column) => each.x.forEach((x, i) => {
        if (!found.has(x)) found.set(x, new Array(this.series.length).fill(null));
        found.get(x)[column] = each.y[i];
      }));
      const unit = { seconds: " (s)", bytes: " (bytes)" };
      const head = [this.x.name + (unit[this.x.kind] || ""), ...this.series.map((each) => each.name + (unit[this.y.kind] || ""))];
      return [head, ...[...found.entries()].sort((a, b) => a[0] - b[0]).map(([x, values]) => [x, ...values])];
    }
  }

  // The place of the value that is known and nearest; `x` goes up.
  function near(each, wanted) {
    let low = 0, high = each.x.length - 1;
    if (high < 0) return null;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (each.x[middle] < wanted) low = middle + 1;
      else high = middle;
    }
    let best = null;
    for (let i = Math.max(0, low - 3); i <= Math.min(each.x.length - 1, low + 3); i++) {
      if (g.known(each.y[i]) && (best === null || Math.abs(each.x[i] - wanted) < Math.abs(each.x[best] - wanted))) best = i;
    }
    return best;
  }

  // Bars: how often each whole number was seen.
  class Histogram extends Plot {
    constructor(options) {
      super(options);
      this.x = options.x;
      this.bars = [];
    }

    set(bars) {
      this.bars = bars;
      this.redraw();
    }

    empty() {
      return !this.bars.length;
    }

    extent() {
      return this.bars.length ? [this.bars[0][0] - 0.5, this.bars[this.bars.length - 1][0] + 0.5] : [0, 1];
    }

    paint(context, width, height) {
      if (this.empty()) return this.paintNothing(context, width, height);
      const [from, to] = this.domain();
      const shown = this.bars.filter(([x]) => x >= from - 0.5 && x <= to + 0.5);
      const high = Math.max(1, ...shown.map(([, value]) => value)) * 1.06;
      const yPixel = (value, area) => area.top + area.height * (1 - value / high);
      this.paintFrame(context, width, height, { xKind: "count", xName: this.x.name, yTicks: g.ticks("step", 0, high, 4), yPixel });
      context.save();
      context.beginPath();
      context.rect(this.area.left, 0, this.area.width, height);
      context.clip();
      context.fillStyle = ink("--c0");
      for (const [x, value] of shown) {
        const left = this.pixelOf(x - 0.4), right = this.pixelOf(x + 0.4), top = yPixel(value, this.area);
        context.fillRect(left, top, Math.max(1, right - left), this.area.top + this.area.height - top);
      }
      context.restore();
    }

    describe(pixel) {
      const at = Math.round(this.xOf(pixel)), found = this.bars.find(([x]) => x === at);
      if (!found) return null;
      return { pixel: this.pixelOf(at), title: `${this.x.name} ${g.count(at)}`, lines: [{ name: "gradients", color: "--c0", value: g.count(found[1]) }] };
    }

    legend() {
      return [];
    }

    rows() {
      return [[this.x.name, "gradients"], ...this.bars];
    }
  }

  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => all.forEach((each) => each.redraw()));
  Object.assign(gradwire, { Plot, Chart, Histogram, ink });
})();
