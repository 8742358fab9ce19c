// Numbers for people, and elements. Strings of runs are anybody's: they become text, never markup.
"use strict";
var gradwire = {};

(function () {
  const SECONDS = [[1e-6, "µs"], [1e-3, "ms"], [1, "s"], [60, "min"], [3600, "h"]];
  const BYTES = [[1, "B"], [1e3, "kB"], [1e6, "MB"], [1e9, "GB"], [1e12, "TB"]];
  const COUNTS = [[1, ""], [1e3, "k"], [1e6, "M"], [1e9, "G"]];
  const UNITS = { seconds: SECONDS, bytes: BYTES };
  const NONE = "–";

  const known = (value) => typeof value === "number" && Number.isFinite(value);

  // The largest unit in which the value is at least one; minutes and hours only from `many` on.
  function unit(kind, value, many = 2) {
    const units = UNITS[kind];
    if (!units) return [1, ""];
    const size = Math.abs(value);
    let found = units[0];
    for (const each of units) {
      if (size >= each[0] * (each[0] >= 60 && kind === "seconds" ? many : 0.9995)) found = each;
    }
    return size === 0 ? [1, kind === "seconds" ? "s" : "B"] : found;
  }

  function significant(value, digits = 3) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e7 || size < 1e-4) return value.toExponential(digits - 1).replace("e+", "e");
    const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
    return value.toLocaleString("en-US", { maximumFractionDigits: decimals, minimumFractionDigits: 0 });
  }

  function measured(kind, value, digits = 3) {
    if (!known(value)) return NONE;
    const [scale, name] = unit(kind, value);
    return significant(value / scale, digits) + (name ? " " + name : "");
  }

  const count = (value) => (known(value) ? Math.round(value).toLocaleString("en-US") : NONE);

  function shortCount(value) {
    if (!known(value)) return NONE;
    let found = COUNTS[0];
    for (const each of COUNTS) if (Math.abs(value) >= each[0]) found = each;
    return significant(value / found[0]) + found[1];
  }

  function duration(seconds) {
    if (!known(seconds)) return NONE;
    if (seconds < 120) return measured("seconds", seconds);
    if (seconds < 1200) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
    const minutes = Math.round(seconds / 60);
    if (minutes < 120) return `${minutes} min`;
    const hours = Math.floor(minutes / 60);
    return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.round(hours / 24)} days`;
  }

  // Values of a chart: kind -> text.
  function value(kind, number) {
    if (kind === "step" || kind === "count") return count(number);
    if (kind === "seconds" || kind === "bytes") return measured(kind, number, 4);
    return known(number) ? significant(number, 4) : NONE;
  }

  // Round places between two ends, and how to write them.
  function ticks(kind, low, high, wanted) {
    const [scale, name] = kind === "seconds" || kind === "bytes" ? unit(kind, Math.max(Math.abs(low), Math.abs(high)), 10) : [1, ""];
    const span = (high - low) / scale;
    if (!(span > 0)) return { at: [], text: () => "" };
    const rough = span / Math.max(wanted, 1);
    const power = Math.pow(10, Math.floor(Math.log10(rough)));
    let step = power * ([1, 2, 5, 10].find((each) => each * power >= rough * 0.75) || 10);
    if (kind === "step" || kind === "count") step = Math.max(1, step);
    const at = [];
    const first = Math.ceil(low / scale / step - 1e-9) + 0;
    for (let i = first; i * step <= (high / scale) * (1 + 1e-12) + step * 1e-9 && at.length < 50; i++) at.push(i * step * scale + 0); // + 0: not -0
    const decimals = Math.min(12, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
    const text = (tick) => {
      const shown = tick / scale;
      if (kind === "step" && Math.abs(shown) >= 1e5) return shortCount(shown);
      if (!name && Math.abs(shown) >= 1e7) return significant(shown, 3);
      if (!name && step < 1e-5) return significant(shown, 3);
      return shown.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }) + (name ? " " + name : "");
    };
    return { at, text };
  }

  function logTicks(kind, low, high, wanted) {
    const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
    const every = Math.max(1, Math.ceil((to - from) / Math.max(wanted, 1)));
    const within = every > 1 || to - from > 3 ? [1] : to - from > 1 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8];
    const at = [];
    for (let power = from; power <= to; power += every) {
      for (const factor of within) {
        const tick = factor * Math.pow(10, power);
        if (tick >= low * 0.9999 && tick <= high * 1.0001) at.push(tick);
      }
    }
    return { at, text: (tick) => (kind === "number" ? significant(tick, 3) : measured(kind, tick, 2)) };
  }

  // element("button", {class: "x", onclick: f}, "text", child, ...)
  function element(name, properties, ...children) {
    const made = document.createElement(name);
    for (const [key, each] of Object.entries(properties || {})) {
      if (key === "class") made.className = each;
      else if (key.startsWith("on")) made.addEventListener(key.slice(2), each);
      else if (each === true) made.setAttribute(key, "");
      else if (each !== false && each !== null && each !== undefined) made.setAttribute(key, String(each));
    }
    for (const child of children.flat()) if (child !== null && child !== undefined) made.append(child);
    return made;
  }

  function swatch(color) {
    const made = element("i", { class: "swatch" });
    made.style.background = `var(${color})`;
    return made;
  }

  function save(name, blob) {
    const url = URL.createObjectURL(blob);
    const link = element("a", { href: url, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }

  // A spreadsheet takes a cell that begins like this for a formula, and names are anybody's.
  function cell(each) {
    if (each === null || each === undefined) return "";
    if (typeof each === "number") return String(each);
    const text = /^[=+\-@\t\r]/.test(each) ? "'" + each : String(each);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }

  const csv = (rows) => rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";

  const COLORS = 8;
  const color = (index) => `--c${((index % COLORS) + COLORS) % COLORS}`;

  Object.assign(gradwire, { NONE, known, significant, measured, count, shortCount, duration, value, ticks, logTicks, element, swatch, save, csv, color });
})();
