// The time line of a film, on a canvas. A column of pixels shows the minimum and the maximum of all its steps.

"use strict";

const LINE_HEIGHT = 156;
const LOW = 98; // bottom of the upper part (pool, waiting, running); the marks of preemptions are below it
const TOP_OF_ITL = 112;
const MARK = 5; // pixels from the centre of a mark within which it is hit
const MIN_OF_ITL = 1e-5; // minimum share of the longest that is drawn

class TimeLine {
  constructor(film, counts) {
    this.film = film;
    this.counts = counts;
    this.begins = Float64Array.from(film.frames, (frame) => frame.time);
    this.ends = new Float64Array(this.begins.length).fill(film.end);
    this.ends.set(this.begins.subarray(1));
    const most = (values) => values.reduce((high, one) => Math.max(high, one), 1);
    this.mostWaiting = most(counts.waiting);
    this.mostRunning = most(counts.running);
    this.longestItl = counts.itl.reduce((high, one) => Math.max(high, one), 0);
    const least = counts.itl.reduce((low, one) => (one > 0 ? Math.min(low, one) : low), Infinity);
    this.shortestItl = Math.max(least, this.longestItl * MIN_OF_ITL);
  }

  // The position of a time on the line, 0 to 1.
  shareOf(time) {
    const { begin, end } = this.film;
    return end > begin ? (time - begin) / (end - begin) : 0;
  }

  timeAt(share) {
    const { begin, end } = this.film;
    return begin + share * (end - begin);
  }

  // columns: of the canvas, in its own pixels; the context's scale is that of `width`. chosen: the number of a request;
  // the time from its arrival to its end is marked; null: none.
  draw(context, width, columns, chosen = null) {
    const { counts } = this;
    const perFrame = (values) => this._extremes(values, this.begins, this.ends, columns);
    const upper = (high) => (value) => LOW - (value / high) * (LOW - 6);
    context.clearRect(0, 0, width, LINE_HEIGHT);
    context.save();
    context.scale(width / columns, 1);
    this._area(context, perFrame(counts.used), upper(1), "--sky");
    this._line(context, perFrame(counts.waiting), upper(this.mostWaiting), "--orange");
    this._line(context, perFrame(counts.running), upper(this.mostRunning), "--blue");
    if (this.longestItl > 0) {
      const decades = Math.max(0.1, Math.log(this.longestItl / this.shortestItl));
      const place = (value) => LINE_HEIGHT - 3 - (Math.log(Math.max(value, this.shortestItl) / this.shortestItl) / decades) * (LINE_HEIGHT - TOP_OF_ITL - 6);
      const gaps = this._extremes(counts.itl, counts.begins, counts.ends, columns, true);
      this._line(context, gaps, place, "--purple");
    }
    context.restore();
    this._marks(context, width);
    const own = chosen === null ? [] : counts.ofRequest[chosen];
    if (own.length) {
      const [from, to] = [own[0].event.time, own.at(-1).event.op === "finished" ? own.at(-1).event.time : this.film.end].map((time) => this.shareOf(time) * width);
      context.fillStyle = colour("--red");
      context.fillRect(from, 0, Math.max(3, to - from), 3);
    }
    context.fillStyle = colour("--rule");
    context.fillRect(0, TOP_OF_ITL - 2, width, 1);
  }

  // The frame of the preemption whose mark is at or next to a point; null: none.
  markAt(x, y, width) {
    if (y < LOW || y > LOW + 12) return null;
    let found = null;
    let nearest = MARK + 1;
    for (const { frame } of this.counts.preemptions) {
      if (frame >= this.begins.length) break;
      const away = Math.abs(Math.round(this.shareOf(this.begins[frame]) * width) - x);
      if (away < nearest) [found, nearest] = [frame, away];
    }
    return found;
  }

  legend() {
    const total = this.counts.preempted.at(-1);
    const range = this.longestItl > 0 ? `${brief(this.shortestItl)} to ${brief(this.longestItl)}, logarithmic` : "none in this film";
    return [
      [["--sky", "KV pool in use, up to 100 %"], ["--orange", `waiting, up to ${thousands(this.mostWaiting)}`],
        ["--blue", `running, up to ${thousands(this.mostRunning)}`], ["--red", counted(total, "preemption")]],
      [["--purple", `longest ITL of a step (between two tokens of a request), ${range}`]],
    ].flat();
  }

  // The value of each column: value i applies from begins[i] to ends[i]. NaN: none.
  _extremes(values, begins, ends, columns, skipsZero = false) {
    const low = new Float64Array(columns).fill(NaN);
    const high = new Float64Array(columns).fill(NaN);
    for (let index = 0; index < values.length; index++) {
      const value = values[index];
      if (skipsZero && value === 0) continue;
      const first = Math.min(columns - 1, Math.max(0, Math.floor(this.shareOf(begins[index]) * columns)));
      const last = Math.min(columns - 1, Math.max(first, Math.ceil(this.shareOf(ends[index]) * columns) - 1));
      for (let column = first; column <= last; column++) {
        if (!(low[column] <= value)) low[column] = value;
        if (!(high[column] >= value)) high[column] = value;
      }
    }
    return { low, high };
  }

  _line(context, { low, high }, place, name) {
    context.beginPath();
    let isOn = false;
    let before = 0;
    for (let column = 0; column < low.length; column++) {
      if (Number.isNaN(low[column])) {
        isOn = false;
        continue;
      }
      let [near, far] = [place(low[column]), place(high[column])];
      if (Math.abs(far - before) < Math.abs(near - before)) [near, far] = [far, near];
      if (isOn) context.lineTo(column, before);
      else context.moveTo(column, near);
      context.lineTo(column, near);
      context.lineTo(column, far);
      context.lineTo(column + 1, far);
      before = far;
      isOn = true;
    }
    context.strokeStyle = colour(name);
    context.lineWidth = 1.5;
    context.stroke();
  }

  _area(context, { high }, place, name) {
    context.globalAlpha = 0.35;
    context.fillStyle = colour(name);
    for (let column = 0; column < high.length; column++) {
      if (high[column] > 0) context.fillRect(column, place(high[column]), 1, LOW - place(high[column]));
    }
    context.globalAlpha = 1;
  }

  // A triangle for a preemption; triangles that would overlap are merged.
  _marks(context, width) {
    context.fillStyle = colour("--red");
    let last = -Infinity;
    let before = 0;
    this.counts.preempted.forEach((total, index) => {
      if (total === before) return;
      before = total;
      const x = Math.round(this.shareOf(this.begins[index]) * width);
      if (x - last < 2) return;
      last = x;
      context.beginPath();
      context.moveTo(x - 4, LOW + 10);
      context.lineTo(x + 4, LOW + 10);
      context.lineTo(x, LOW + 2);
      context.fill();
    });
  }
}

// A time in few digits.
function brief(time) {
  const digits = (value) => String(Number(value.toPrecision(3)));
  return time < 1 ? `${digits(time * 1000)} ms` : `${digits(time)} s`;
}
