// Where data comes from: a server that is asked, or what a report holds.
"use strict";

(function () {
  class Live {
    constructor() {
      this.live = true;
    }

    async _get(path, query) {
      const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
      const response = await fetch(`/api/${path}?${new URLSearchParams(given)}`, { cache: "no-store" });
      if (!response.ok) throw Object.assign(new Error(await response.text()), { status: response.status });
      return response.json();
    }

    runs(since) {
      return this._get("runs", { since });
    }

    series(run, groups, axis, zoom) {
      return this._get("series", { run, groups: groups.join(","), axis, from: zoom && zoom[0], to: zoom && zoom[1] });
    }

    part(run, part) {
      return this._get("part", { run, part });
    }

    layer(run, name) {
      return this._get("layer", { run, name });
    }

    timeline(run, step) {
      return this._get("timeline", { run, step });
    }
  }

  class Kept {
    constructor(data) {
      this.live = false;
      this.data = data;
    }

    async runs(since) {
      return since === 1 ? { version: 1 } : { version: 1, runs: this.data.runs };
    }

    async series(run, groups) {
      const all = this.data.series[run];
      return Object.fromEntries(groups.map((group) => [group, all[group]]));
    }

    async part(run, part) {
      return this.data.parts[run][part];
    }

    async layer(run, name) {
      const found = this.data.layers[run].find((each) => each.name === name);
      return found || { step: [], error: [], residual: [] };
    }

    async timeline(run) {
      return this.data.timeline[run];
    }
  }

  function source() {
    const kept = document.getElementById("data");
    return kept ? new Kept(JSON.parse(kept.textContent)) : new Live();
  }

  Object.assign(gradwire, { source });
})();
