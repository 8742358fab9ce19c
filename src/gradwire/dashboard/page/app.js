// The page: what is chosen, what has to be fetched for it, and where it is shown.
"use strict";

(function () {
  const g = gradwire, e = g.element;
  const EVERY_MS = 1000;
  const AXES = { step: { kind: "step", name: "step" }, seconds: { kind: "seconds", name: "time" }, bytes: { kind: "bytes", name: "sent" } };
  const SILENT_S = 60;

  const source = g.source();
  const state = { version: -1, runs: [], focus: null, ticked: new Set(), touched: false, opened: false, axis: "step", target: null, layer: null, step: null, plan: null };
  const cache = new Map(); // what -> {version, data}
  let busy = false, again = false;

  const run = () => state.runs.find((each) => each.id === state.focus) || null;
  const colorOf = (id) => g.color(state.runs.findIndex((each) => each.id === id));
  const cached = (key) => (cache.has(key) ? cache.get(key).data : null);
  const selected = () => state.runs.filter((each) => state.ticked.has(each.id) || each.id === state.focus);

  // ---- elements ----
  const button = (text, onclick, extra) => e("button", { type: "button", onclick, ...extra }, text);
  const charts = {
    loss: new g.Chart({
      id: "loss", title: "Loss", height: 300, half: false, y: { kind: "number" },
      controls: [
        g.choice("against", [["step", "steps"], ["seconds", "seconds"], ["bytes", "bytes"]], "step", (axis) => { state.axis = axis; charts.loss.zoom = null; show(); sync(); }),
        g.choice("scale", [["linear", "linear"], ["log", "log"]], "linear", (scale) => charts.loss.setLog(scale === "log")),
      ],
    }),
    time: new g.Chart({ id: "time", title: "Step time", y: { kind: "seconds", zero: true } }),
    phases: new g.Chart({ id: "phases", title: "Encode, wire, decode", note: "of all buckets; beside computing", y: { kind: "seconds", zero: true } }),
    bytes: new g.Chart({ id: "bytes", title: "Bytes a step", y: { kind: "bytes", zero: true } }),
    ratio: new g.Chart({ id: "ratio", title: "Sent against float32", note: "1 is a float32 ring all-reduce", y: { kind: "number", zero: true } }),
  };
  for (const chart of Object.values(charts)) chart.onzoom = () => { show(); sync(); };

  const stepInput = e("input", { type: "number", min: 0, step: 1, id: "timeline-step", "aria-label": "step", placeholder: "last" });
  stepInput.addEventListener("change", () => chooseStep(stepInput.value === "" ? null : Number(stepInput.value)));
  const timeline = new g.Timeline({
    id: "timeline", title: "Workers in a step", half: false,
    controls: source.live ? [e("label", {}, "step", stepInput), button("last", () => chooseStep(null), { class: "plain" })] : [],
  });
  timeline.plotElement.classList.add("scroll");
  const workers = new g.Table({
    id: "workers", sort: "rank", mark: (row) => (row.slow ? "slow" : ""),
    columns: [
      { key: "rank", name: "worker", cell: (row) => `rank ${row.rank}` + (row.slow ? ", slow" : "") },
      { key: "host", name: "host", class: "name", cell: (row) => text(row.host) },
      { key: "state", name: "state", cell: (row) => text(row.state) },
      { key: "step", name: "last step", right: true, cell: (row) => g.count(row.step) },
      { key: "step_s", name: "step time", right: true, cell: (row) => g.measured("seconds", row.step_s) },
      { key: "compute_s", name: "compute", right: true, cell: (row) => g.measured("seconds", row.compute_s) },
      { key: "exposed_s", name: "exposed", right: true, cell: (row) => g.measured("seconds", row.exposed_s) },
      { key: "sent", name: "sent", right: true, cell: (row) => g.measured("bytes", row.sent) },
    ],
  });
  timeline.element.append(e("p", { class: "hint sub" }, "Medians of the last 100 steps; sent in all."), workers.element);

  const most = { error: 0, residual: 0 };
  const layers = new g.Table({
    id: "layers-table", mark: (row) => (row.name === state.layer ? "chosen" : ""),
    columns: [
      { key: "name", name: "layer", class: "name", cell: (row) => button(row.name, () => chooseLayer(row.name), { "data-focus": row.name, title: row.name }) },
      { key: "codec", name: "travels as", class: "name", cell: (row) => text(row.codec) },
      { key: "step", name: "at step", right: true, cell: (row) => g.count(row.step) },
      { key: "error", name: "relative error", right: true, cell: (row) => g.barCell(row.error, most.error) },
      { key: "residual", name: "residual", right: true, cell: (row) => g.barCell(row.residual, most.residual, true) },
    ],
  });
  const history = new g.Chart({ id: "layer-history", title: "History", height: 180, half: false, y: { kind: "number", zero: true } });
  history.element.className = "sub";
  history.element.hidden = true;
  const layersNote = e("small");
  const layersCard = card("layers", ["Layers", layersNote], [], layers.element, history.element);

  const planChoice = e("select", { "aria-label": "plan" });
  planChoice.addEventListener("change", () => { state.plan = planChoice.value; showPlans(); });
  const planReason = e("p", { class: "reason" }), planFacts = e("dl", { class: "facts" });
  const planTable = new g.Table({
    id: "plan-table",
    columns: [
      { key: "bucket", name: "bucket", right: false, cell: (row) => String(row.bucket) },
      { key: "parameters", name: "parameters", right: true, cell: (row) => g.count(row.parameters) },
      { key: "dense_bytes", name: "bytes", right: true, cell: (row) => g.measured("bytes", row.dense_bytes) },
      { key: "method", name: "travels as", class: "name", cell: (row) => text(row.method) },
      { key: "sent_bytes", name: "sent", right: true, cell: (row) => g.measured("bytes", row.sent_bytes) },
      { key: "ready_s", name: "ready after", right: true, cell: (row) => g.measured("seconds", row.ready_s) },
      { key: "predicted_s", name: "predicted", right: true, cell: (row) => g.measured("seconds", row.predicted_s) },
      { key: "measured_s", name: "measured", right: true, cell: (row) => g.measured("seconds", row.measured_s) },
    ],
  });
  const planCard = card("plan", ["Plan"], [planChoice], planReason, planTable.element, e("p", { class: "hint sub" }, "Step time predicted, of this plan and of the others"), planFacts);

  const notes = new g.Table({
    id: "notes-table",
    columns: [
      { key: "step", name: "step", right: true, cell: (row) => g.count(row.step) },
      { key: "time", name: "when", cell: (row) => when(row.time) },
      { key: "who", name: "told by", cell: (row) => row.who },
      { key: "what", name: "what", class: "wrap", cell: (row) => row.what },
    ],
    sort: "time", down: true,
  });
  const notesNote = e("small");
  const notesCard = card("notes", ["Notes", notesNote], [], notes.element);

  const queue = new g.Chart({ id: "queue", title: "Coordinator: pushes being received or applied", y: { kind: "number", zero: true } });
  const rate = new g.Chart({ id: "updates", title: "Coordinator: updates a second", y: { kind: "number", zero: true } });
  const ages = new g.Histogram({ id: "staleness", title: "Coordinator: staleness of gradients", half: false, height: 200, x: { name: "versions behind" } });

  const facts = e("dl", { class: "facts" });
  const aboutCard = card("about", ["Settings"], [], facts);

  const target = e("input", { type: "number", step: "any", id: "target", "aria-label": "loss to reach" });
  target.addEventListener("input", () => { state.target = target.value === "" ? null : Number(target.value); showRuns(); });
  const runsTable = new g.Table({
    id: "runs-table", mark: (row) => (row.id === state.focus ? "chosen" : ""),
    columns: [
      { key: "tick", name: "", fixed: true, cell: (row) => tickCell(row) },
      { key: "name", name: "run", class: "name", cell: (row) => button(row.name, () => choose(row.id), { "data-focus": `name ${row.id}`, title: row.name }) },
      { key: "state", name: "state", cell: (row) => pill(row) },
      { key: "codec", name: "travels as", class: "name", cell: (row) => text(row.codec) },
      { key: "ranks", name: "workers", right: true, cell: (row) => g.count(row.ranks) },
      { key: "step", name: "steps", right: true, cell: (row) => g.count(row.step) },
      { key: "loss", name: "loss", right: true, cell: (row) => (g.known(row.loss) ? g.significant(row.loss, 4) : g.NONE) },
      { key: "seconds", name: "time", right: true, cell: (row) => g.duration(row.seconds) },
      { key: "sent", name: "sent", right: true, cell: (row) => g.measured("bytes", row.sent) },
      { key: "ratio", name: "against float32", right: true, cell: (row) => (g.known(row.ratio) ? g.significant(row.ratio, 3) : g.NONE) },
      { key: "reach", name: "time to the loss", right: true, value: (row) => (row.reach ? row.reach.seconds : null), cell: (row) => (row.reach ? `${g.duration(row.reach.seconds)}, step ${g.count(row.reach.step)}` : g.NONE) },
    ],
  });
  const runsCard = card("runs", ["Runs"], [e("label", {}, "time to a loss of", target)], runsTable.element);
  const tiles = e("dl", { class: "tiles", id: "tiles" });

  function card(id, title, controls, ...children) {
    return e("section", { class: "card", id }, e("header", {}, e("h2", {}, ...title), ...controls), ...children);
  }

  const text = (value) => (typeof value === "string" && value ? value : g.NONE);
  const when = (seconds) => (g.known(seconds) ? new Date(seconds * 1000).toLocaleString("en-GB") : g.NONE);
  const now = () => (source.live ? Date.now() / 1000 : source.data.made);
  const silent = (row) => g.known(row.time) && now() - row.time > SILENT_S;
  const today = (seconds) => new Date(seconds * 1000).toDateString() === new Date().toDateString();
  const clock = (seconds) => (g.known(seconds) && today(seconds) ? new Date(seconds * 1000).toLocaleTimeString("en-GB") : when(seconds));

  // A rank that was killed cannot say so: its file just ends.
  function workerState(row, focus) {
    const lost = row.state === "running" && focus && !focus.reading && (focus.state === "failed" || silent(row));
    return lost ? `no word since ${clock(row.time)}` : text(row.state);
  }

  function pill(row) {
    const said = row.reading ? `reading ${Math.floor(100 * row.progress)}%` : row.state;
    return e("span", { class: `state ${["running", "done", "failed", "empty"].includes(row.state) ? row.state : "empty"}` }, said);
  }

  function tickCell(row) {
    const box = e("input", { type: "checkbox", "aria-label": `show ${row.name}`, "data-focus": `tick ${row.id}` });
    box.checked = state.ticked.has(row.id);
    box.addEventListener("change", () => {
      state.touched = true;
      if (box.checked) state.ticked.add(row.id);
      else state.ticked.delete(row.id);
      show();
      sync();
    });
    return e("label", {}, box, g.swatch(colorOf(row.id)));
  }

  // ---- choosing ----
  function choose(id) {
    state.opened = true;
    if (state.focus === id) return;
    Object.assign(state, { focus: id, layer: null, step: null, plan: null });
    state.ticked.add(id);
    stepInput.value = "";
    for (const chart of [...Object.values(charts), timeline, queue, rate]) chart.zoom = null;
    show();
    sync();
  }

  function chooseLayer(name) {
    state.layer = state.layer === name ? null : name;
    layers.refresh();
    showLayer();
    sync();
  }

  function chooseStep(step) {
    state.step = step !== null && Number.isFinite(step) && step >= 0 ? Math.floor(step) : null;
    stepInput.value = state.step === null ? "" : String(state.step);
    show();
    sync();
  }

  // ---- fetching: what is needed, and in which version it is there ----
  function needed() {
    const found = [];
    const need = (key, version, load) => found.push({ key, version, load });
    for (const each of selected()) {
      const zoom = charts.loss.zoom, axis = state.axis;
      need(lossKey(each.id), each.versions.steps, async () => (await source.series(each.id, ["loss"], axis, zoom)).loss);
      need(`validations ${each.id}`, each.versions.validations + each.versions.steps / 1e15, () => source.part(each.id, "validations"));
    }
    const focus = run();
    if (!focus) return found;
    const at = focus.versions, id = focus.id;
    for (const name of ["time", "phases", "bytes", "ratio"]) {
      const group = name === "ratio" ? "bytes" : name, zoom = charts[name].zoom;
      need(seriesKey(name, id), at.steps, async () => (await source.series(id, [group], "step", zoom))[group]);
    }
    need(`workers ${id}`, `${at.steps} ${at.about}`, () => source.part(id, "workers"));
    const step = state.step;
    need(`timeline ${id} ${step}`, step === null ? at.steps : 0, () => source.timeline(id, step));
    for (const part of ["layers", "plans", "notes", "about", "coordinator"]) need(`${part} ${id}`, at[part], () => source.part(id, part));
    const layer = state.layer;
    if (layer !== null) need(`layer ${id} ${layer}`, at.layers, () => source.layer(id, layer));
    return found;
  }

  const wholeLossKey = (id) => `loss ${id}`; // has all axes
  const lossKey = (id) => (charts.loss.zoom ? `loss ${id} ${state.axis} ${JSON.stringify(charts.loss.zoom)}` : wholeLossKey(id));
  const seriesKey = (name, id) => `${name} ${id} ${JSON.stringify(charts[name].zoom)}`;

  async function sync() {
    if (busy) {
      again = true;
      return;
    }
    busy = true;
    try {
      do {
        again = false;
        await refresh();
      } while (again);
      connection("");
    } catch (error) {
      connection(error.status === 401 ? "the token is no longer right" : error.status ? `error: ${error.message}` : "no connection to gradwire dash");
    } finally {
      busy = false;
    }
  }

  async function refresh() {
    const told = await source.runs(state.version);
    if (told.runs) {
      state.runs = told.runs;
      state.version = told.version;
      chooseFirst();
      showRuns();
      showTiles();
    }
    const wanted = needed().filter(({ key, version }) => !cache.has(key) || cache.get(key).version !== version);
    for (const { key, version, load } of wanted) {
      if (again) break; // something else was chosen meanwhile
      cache.set(key, { version, data: await load() });
    }
    const keep = new Set(needed().map(({ key }) => key));
    if (cache.size > 400) for (const key of cache.keys()) if (!keep.has(key)) cache.delete(key);
    if (wanted.length) show();
  }

  function chooseFirst() {
    if (!state.runs.length) return;
    if (!run() || !state.opened) {
      // The one that was started last; which that is shows when the beginning of each has been read.
      const newest = [...state.runs].sort((a, b) => (b.started || 0) - (a.started || 0) || (b.time || 0) - (a.time || 0))[0];
      state.opened = state.runs.every((each) => !each.reading);
      state.focus = newest.id;
      state.ticked.add(newest.id);
    }
    if (!state.touched && state.runs.length <= 6) for (const each of state.runs) state.ticked.add(each.id);
  }

  // ---- showing ----
  function show() {
    showRuns();
    showTiles();
    showLoss();
    showSeries();
    showTimeline();
    showWorkers();
    showLayers();
    showPlans();
    showNotes();
    showCoordinator();
    showAbout();
  }

  function showRuns() {
    const waiting = document.getElementById("waiting");
    waiting.hidden = state.runs.length > 0;
    waiting.textContent = "no runs yet: they appear here when their first records are written";
    for (const each of main.children) if (each !== waiting && !state.runs.length) each.hidden = true;
    runsCard.hidden = state.runs.length < 2;
    tiles.hidden = !state.runs.length;
    runsTable.set(state.runs.map((each) => ({ ...each, versions: null, time: null, shown: state.ticked.has(each.id), chosen: each.id === state.focus, reach: reached(each.id) })));
    const focus = run();
    document.getElementById("subtitle").textContent = focus ? (state.runs.length > 1 ? `${focus.name} (1 of ${state.runs.length} runs)` : focus.name) : "";
    document.title = focus ? `${focus.name} - gradwire` : "gradwire";
  }

  // As exact as the chart: a loss that was reached between two of its points counts at the second.
  function reached(id) {
    const data = cached(wholeLossKey(id)) || cached(lossKey(id));
    if (!data || state.target === null) return null;
    const i = data.values.loss.findIndex((loss) => g.known(loss) && loss <= state.target);
    return i < 0 ? null : { seconds: data.seconds[i], step: data.step[i] };
  }

  function tile(name, value, small, extra) {
    return e("div", { class: "tile", "data-tile": name }, e("dt", {}, name), e("dd", {}, value), e("small", {}, small), extra);
  }

  function showTiles() {
    const focus = run();
    if (!focus) return;
    const left = focus.state === "running" && g.known(focus.planned) && g.known(focus.step_s) ? Math.max(0, focus.planned - (focus.step || 0)) * focus.step_s : null;
    const quiet = focus.state === "running" && !focus.reading && silent(focus);
    const about = focus.state === "failed" ? text(focus.what) : quiet ? `no news for ${g.duration(now() - focus.time)}` : [`${g.count(focus.ranks)} ${focus.ranks === 1 ? "worker" : "workers"}`, text(focus.codec)].join(", ");
    const validation = focus.validation || {};
    const checked = [g.known(validation.loss) ? `validation ${g.significant(validation.loss, 3)}` : null, g.known(validation.accuracy) ? `${g.significant(100 * validation.accuracy, 3)}%` : null].filter(Boolean).join(", ");
    const bar = e("div", { class: "bar" }, e("i"));
    bar.firstChild.style.width = g.known(focus.planned) ? `${Math.min(100, (100 * (focus.step || 0)) / focus.planned)}%` : "0";
    tiles.replaceChildren(
      tile("state", pill(focus), about),
      tile("step", g.count(focus.step), g.known(focus.planned) ? `of ${g.count(focus.planned)}` : "", g.known(focus.planned) ? bar : null),
      tile(left === null ? "time" : "time left", left === null ? g.duration(focus.seconds) : g.duration(left), left === null ? "" : `${g.duration(focus.seconds)} so far`),
      tile("loss", g.known(focus.loss) ? g.significant(focus.loss, 4) : g.NONE, checked),
      tile("step time", g.measured("seconds", focus.step_s), "median of the last 100"),
      tile("sent a step", g.measured("bytes", focus.step_bytes), `${g.measured("bytes", focus.sent)} in all`),
      tile("against float32", g.known(focus.ratio) ? g.significant(focus.ratio, 3) : g.NONE, g.known(focus.ratio) && focus.ratio > 0 && focus.ratio < 0.95 ? `${g.significant(1 / focus.ratio, 2)} times fewer bytes` : ""),
    );
  }

  function showLoss() {
    const shown = selected(), series = [];
    for (const each of shown) {
      const data = cached(lossKey(each.id)) || cached(wholeLossKey(each.id));
      const name = shown.length > 1 ? each.name : "training loss";
      if (data) series.push({ name, color: colorOf(each.id), x: data[state.axis], y: data.values.loss, style: "line" });
    }
    for (const each of shown) {
      const found = (cached(`validations ${each.id}`) || []).filter((point) => g.known(point.loss) && g.known(point[state.axis]));
      const name = shown.length > 1 ? `${each.name}, validation` : "validation loss";
      if (found.length) series.push({ name, color: shown.length > 1 ? colorOf(each.id) : "--c1", x: found.map((point) => point[state.axis]), y: found.map((point) => point.loss), style: "points" });
    }
    charts.loss.set({ x: AXES[state.axis], series });
    charts.loss.element.hidden = !state.runs.length;
  }

  function showSeries() {
    const id = state.focus;
    const lines = (name, group, names, style = "line") => {
      const data = cached(seriesKey(name, id)) || cached(`${name} ${id} null`);
      // The first step of a run has no times: there is nothing before it to count from.
      const there = data ? data.step.map((_, i) => i).filter((i) => style !== "area" || names.some(([key]) => g.known(data.values[key][i]))) : [];
      const column = (values) => (there.length === values.length ? values : there.map((i) => values[i]));
      const series = data ? names.map(([key, label, color, dash]) => ({ name: label, color, x: column(data.step), y: column(data.values[key]), style, dash })).filter((each) => each.y.some(g.known)) : [];
      charts[name].set({ x: AXES.step, series });
      charts[name].element.hidden = !data || !series.length;
      return series;
    };
    lines("time", "time", [["compute_s", "compute", "--c0"], ["exposed_s", "exposed communication", "--c1"]], "area");
    if (charts.time.element.hidden) lines("time", "time", [["seconds", "whole step", "--c0"]]);
    lines("phases", "phases", [["encode_s", "encode", "--c2"], ["wire_s", "wire", "--c3"], ["decode_s", "decode", "--c5"]]);
    lines("bytes", "bytes", [["sent", "sent", "--c0"], ["received", "received", "--c1", [4, 4]]]);
    lines("ratio", "bytes", [["ratio", "sent / float32", "--c3"]]);
  }

  function showTimeline() {
    const data = cached(`timeline ${state.focus} ${state.step}`);
    if (data) timeline.set(data);
    timeline.note = data && data.step !== null ? `step ${g.count(data.step)}` : "";
    timeline.plotElement.hidden = !data || !data.rows.length;
  }

  function showWorkers() {
    const focus = run(), rows = cached(`workers ${state.focus}`) || [];
    workers.set(rows.map((row) => ({ ...row, state: workerState(row, focus) })));
    timeline.element.hidden = !rows.length;
  }

  function showLayers() {
    const rows = cached(`layers ${state.focus}`) || [];
    most.error = Math.max(0, ...rows.map((row) => row.error || 0));
    most.residual = Math.max(0, ...rows.map((row) => row.residual || 0));
    layers.set(rows);
    layersNote.textContent = "error of what was sent, squared, relative; what error feedback keeps back, over the gradient's norm";
    layersCard.hidden = !rows.length;
    showLayer();
  }

  function showLayer() {
    const data = state.layer === null ? null : cached(`layer ${state.focus} ${state.layer}`);
    history.element.hidden = state.layer === null;
    if (!data) return;
    history.note = state.layer;
    history.set({ x: AXES.step, series: [
      { name: "relative error", color: "--c0", x: data.step, y: data.error, style: "line", dots: true },
      { name: "residual", color: "--c1", x: data.step, y: data.residual, style: "line", dots: true },
    ] });
  }

  function showPlans() {
    const plans = cached(`plans ${state.focus}`) || [];
    planCard.hidden = !plans.length;
    if (!plans.length) return;
    const names = plans.map((plan, i) => `${i + 1} of ${plans.length}: step ${g.count(plan.step)}, ${text(plan.name)}`);
    if (JSON.stringify(names) !== planChoice.dataset.names) {
      planChoice.dataset.names = JSON.stringify(names);
      planChoice.replaceChildren(...names.map((name, i) => e("option", { value: String(i) }, name)));
    }
    const index = state.plan === null || !plans[Number(state.plan)] ? plans.length - 1 : Number(state.plan);
    planChoice.value = String(index);
    const plan = plans[index];
    planReason.textContent = text(plan.reason);
    planTable.set((Array.isArray(plan.buckets) ? plan.buckets : []).filter((each) => each && typeof each === "object").map((each, i) => ({ bucket: i, ...each })));
    const others = plan.alternatives && typeof plan.alternatives === "object" ? Object.entries(plan.alternatives) : [];
    const time = (value) => g.measured("seconds", value);
    showFacts(planFacts, [["predicted", time(plan.predicted_s)], ["measured", time(plan.measured_s)], ["computing alone", time(plan.computing_s)], ...others.map(([name, seconds]) => [`all as ${name}`, time(seconds)])]);
  }

  function showNotes() {
    const data = cached(`notes ${state.focus}`), ranks = (run() || {}).ranks;
    const rows = data ? [
      ...data.notes.map((note) => ({ step: note.step, time: note.time, what: note.what, who: note.ranks.length > 1 && note.ranks.length === ranks ? "all" : `rank ${note.ranks.slice(0, 8).join(", ")}` })),
      ...data.drops.map((drop) => ({ step: drop.step, time: drop.time, what: `gradients of rank ${drop.rank ?? "?"} left out: ${text(drop.what)}`, who: "" })),
    ] : [];
    notes.set(rows);
    notesNote.textContent = data && data.dropped ? `gradients left out: ${g.count(data.dropped)}` : "";
    notesCard.hidden = !rows.length;
  }

  function showCoordinator() {
    const data = cached(`coordinator ${state.focus}`), there = Boolean(data && data.rows);
    for (const each of [queue, rate, ages]) each.element.hidden = !there;
    if (!there) return;
    const line = (name, key, color) => ({ name, color, x: data.seconds, y: data.values[key], style: "line" });
    queue.set({ x: AXES.seconds, series: [line("queued", "queued", "--c0"), line("workers", "workers", "--c7")] });
    rate.set({ x: AXES.seconds, series: [line("updates a second", "rate", "--c2")] });
    ages.set(data.staleness);
    ages.element.hidden = !data.staleness.length;
    rate.note = `${g.count(data.now.applied)} applied, ${g.count(data.now.refused)} refused`;
  }

  function showAbout() {
    const data = cached(`about ${state.focus}`);
    aboutCard.hidden = !data;
    if (!data) return;
    const start = data.start, settings = start.settings && typeof start.settings === "object" && !Array.isArray(start.settings) ? start.settings : {};
    const said = (value) => (typeof value === "string" ? value : typeof value === "number" ? (Number.isInteger(value) ? String(value) : g.significant(value, 6)) : JSON.stringify(value));
    const pairs = [
      ["travels as", said(start.codec)], ["workers", g.count(start.ranks)], ["parameters", g.count(start.parameters)], ["steps planned", g.count(start.steps)],
      ["gradwire", said(start.gradwire)], ["torch", said(start.torch)], ["host", said(start.host)], ["started", when(start.time)],
      ...(data.starts > 1 ? [["started again", `${data.starts - 1} times`]] : []), ...(data.layout.length ? [["buckets", g.count(data.layout.length)]] : []),
      ...(run() && run().skipped ? [["lines not understood", g.count(run().skipped)]] : []),
      ...Object.entries(settings).filter(([, value]) => value !== null).map(([name, value]) => [name, said(value)]),
      ...data.ends.filter((end) => end.what).map((end) => [`rank ${end.rank}: ${text(end.status)}`, text(end.what)]),
    ];
    if (!source.live) pairs.push(["report made", when(source.data.made)], ["by gradwire", source.data.gradwire]);
    showFacts(facts, pairs.filter(([, value]) => value !== undefined && value !== null && value !== g.NONE));
  }

  function showFacts(list, pairs) {
    const said = JSON.stringify(pairs);
    if (list.dataset.said === said) return;
    list.dataset.said = said;
    list.replaceChildren(...pairs.map(([name, value]) => e("div", {}, e("dt", { title: name }, name), e("dd", {}, String(value)))));
  }

  function connection(problem) {
    const place = document.getElementById("connection");
    place.textContent = problem || (source.live ? "live" : `made ${when(source.data.made)}`);
    place.classList.toggle("lost", Boolean(problem));
  }

  // ---- beginning ----
  const main = document.getElementById("main");
  main.append(runsCard, tiles, ...Object.values(charts).map((chart) => chart.element), timeline.element, layersCard, planCard, notesCard, queue.element, rate.element, ages.element, aboutCard);
  for (const each of main.children) each.hidden = each.id !== "waiting";
  // The cookie is set: the token need not stay where it can be read over a shoulder, or be copied with the address.
  if (source.live && location.search) window.history.replaceState(null, "", location.pathname);
  sync();
  if (source.live) {
    setInterval(() => { if (document.visibilityState === "visible") { sync(); showTiles(); showWorkers(); } }, EVERY_MS);
    document.addEventListener("visibilitychange", () => { if (document.visibilityState === "visible") sync(); });
  }
})();
