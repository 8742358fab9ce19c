// One step of every worker: what it computed, what it then waited for, and the buckets under way meanwhile.
"use strict";

(function () {
  const g = gradwire;
  const LANES = 4, LANE = 7, BAR = 16, GAP = 12, ROWS = 128;
  const CODEC_COLORS = [2, 3, 5, 4, 6, 7];

  class Timeline extends g.Plot {
    constructor(options) {
      super(options);
      this.data = { step: null, rows: [] };
      this.placed = [];
      this.codecs = [];
    }

    set(data) {
      if (data.step !== this.data.step) this.zoom = this.keep ? this.zoom : null;
      this.data = data;
      this.codecs = [];
      for (const row of data.rows) for (const bucket of row.buckets) if (!this.codecs.includes(this._codec(bucket))) this.codecs.push(this._codec(bucket));
      const computing = data.rows.map((row) => row.compute_s).filter(g.known).sort((a, b) => a - b);
      this.middle = computing.length > 1 ? (computing[(computing.length - 1) >> 1] + computing[computing.length >> 1]) / 2 : null;
      this.placed = this._place(data.rows.slice(0, ROWS));
      this.redraw();
    }

    _codec(bucket) {
      return typeof bucket.codec === "string" ? bucket.codec : "?";
    }

    color(codec) {
      return g.color(CODEC_COLORS[this.codecs.indexOf(codec) % CODEC_COLORS.length]);
    }

    // Buckets that are under way at once lie in lanes below each other.
    _place(rows) {
      let top = 0;
      return rows.map((row) => {
        const ends = [];
        const buckets = row.buckets.map((bucket, index) => ({ bucket, index })).filter(({ bucket }) => g.known(bucket.ready_s) && g.known(bucket.done_s));
        buckets.sort((a, b) => a.bucket.ready_s - b.bucket.ready_s);
        for (const each of buckets) {
          let lane = ends.findIndex((end) => end <= each.bucket.ready_s + 1e-9);
          if (lane < 0) lane = ends.length < LANES ? ends.length : ends.indexOf(Math.min(...ends));
          ends[lane] = each.bucket.done_s;
          each.lane = lane;
        }
        const height = BAR + (ends.length ? 3 + ends.length * LANE : 0);
        const placed = { row, buckets, top, height };
        top += height + GAP;
        return placed;
      });
    }

    empty() {
      return !this.placed.length;
    }

    extent() {
      let high = 0;
      for (const { row } of this.placed) {
        high = Math.max(high, (row.compute_s || 0) + (row.exposed_s || 0), row.seconds || 0, ...row.buckets.map((each) => each.done_s || 0));
      }
      return [0, high || 1];
    }

    plotHeight() {
      const last = this.placed[this.placed.length - 1];
      return last ? last.top + last.height + 56 : 90;
    }

    slow(row) {
      return this.middle !== null && row.compute_s > 1.25 * this.middle;
    }

    paint(context, width, height) {
      if (this.empty()) return this.paintNothing(context, width, height);
      context.font = "12px sans-serif";
      const labels = this.placed.map(({ row }) => `rank ${row.rank}` + (this.slow(row) ? ", slow" : ""));
      const left = Math.max(...labels.map((each) => context.measureText(each).width)) + 16;
      this.paintFrame(context, width, height, { xKind: "seconds", xName: "since the end of the step before", yTicks: null, left });
      this.placed.forEach((placed, index) => this._paintRow(context, placed, labels[index]));
    }

    _paintRow(context, { row, buckets, top, height }, label) {
      const area = this.area, y = area.top + top + 2;
      context.textAlign = "right";
      context.textBaseline = "middle";
      context.fillStyle = g.ink(this.slow(row) ? "--warn" : "--muted");
      context.fillText(label, area.left - 8, y + BAR / 2);
      context.save();
      context.beginPath();
      context.rect(area.left, y - 1, area.width, height + 2);
      context.clip();
      const compute = g.known(row.compute_s) ? row.compute_s : 0, exposed = g.known(row.exposed_s) ? row.exposed_s : 0;
      if (!this.hidden.has("compute")) this._bar(context, 0, compute, y, BAR, "--c0", 0.75);
      if (!this.hidden.has("exposed communication")) this._bar(context, compute, compute + exposed, y, BAR, "--c1", 0.9);
      for (const { bucket, lane } of buckets) {
        const codec = this._codec(bucket);
        if (!this.hidden.has(codec)) this._bar(context, bucket.ready_s, bucket.done_s, y + BAR + 3 + lane * LANE, LANE - 2, this.color(codec), 1);
      }
      context.restore();
    }

    _bar(context, from, to, y, height, color, alpha) {
      if (!(to > from)) return;
      const left = this.pixelOf(from), right = this.pixelOf(to);
      context.globalAlpha = alpha;
      context.fillStyle = g.ink(color);
      context.fillRect(left, y, Math.max(1, right - left - 0.5), height);
      context.globalAlpha = 1;
    }

    describe(pixel, y) {
      const inside = y - this.area.top - 2;
      const found = this.placed.find(({ top, height }) => inside >= top - GAP / 2 && inside <= top + height + GAP / 2);
      if (!found) return null;
      const at = this.xOf(pixel), row = found.row;
      const lane = Math.floor((inside - found.top - BAR - 3) / LANE);
      const hit = found.buckets.find((each) => each.lane === lane && at >= each.bucket.ready_s && at <= each.bucket.done_s);
      const time = (value) => g.measured("seconds", value);
      const lines = hit ? [
        { name: this._codec(hit.bucket), color: this.color(this._codec(hit.bucket)), value: `bucket ${hit.index}` },
        { name: "under way", value: `${time(hit.bucket.ready_s)} to ${time(hit.bucket.done_s)}` },
        { name: "encode, wire, decode", value: `${time(hit.bucket.encode_s)}, ${time(hit.bucket.wire_s)}, ${time(hit.bucket.decode_s)}` },
        { name: "sent", value: `${g.measured("bytes", hit.bucket.sent)} of ${g.measured("bytes", hit.bucket.dense)}` },
      ] : [
        { name: "compute", color: "--c0", value: time(row.compute_s) },
        { name: "exposed communication", color: "--c1", value: time(row.exposed_s) },
        { name: "whole step", value: time(row.seconds) },
        { name: "here", value: time(at) },
      ];
      return { pixel, title: `rank ${row.rank}, step ${g.count(row.step)}`, lines, follow: true };
    }

    legend() {
      if (this.empty()) return [];
      const fixed = [{ name: "compute", color: "--c0" }, { name: "exposed communication", color: "--c1" }];
      return [...fixed, ...this.codecs.map((codec) => ({ name: codec, color: this.color(codec) }))];
    }

    rows() {
      const head = ["rank", "step", "what", "codec", "from (s)", "to (s)", "sent (bytes)"];
      const lines = [];
      for (const row of this.data.rows) {
        lines.push([row.rank, row.step, "compute", "", 0, row.compute_s, null]);
        lines.push([row.rank, row.step, "exposed", "", row.compute_s, (row.compute_s || 0) + (row.exposed_s || 0), row.sent]);
        row.buckets.forEach((each, i) => lines.push([row.rank, row.step, `bucket ${i}`, this._codec(each), each.ready_s, each.done_s, each.sent]));
      }
      return [head, ...lines];
    }
  }

  Object.assign(gradwire, { Timeline });
})();
