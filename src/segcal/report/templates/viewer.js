// The case viewer: NiiVue draws image and overlay in three planes, a canvas above it the contours. Numbers at a
// threshold are made in Python and come with the source; here they are only looked up.
//
// mountViewer(root, source) takes the markup of viewer.html.j2 and returns {show(source), close()}. NiiVue must be there
// as the global `niivue`. A source is {case, classes, methods, shape, oriented, hasImage, hasLabels, curves,
// volume(kind, method, class) -> Promise<Uint8Array> of a NIfTI file}: see docs/howto/look-at-cases.md.

const mountViewer = (() => {
  const PLANES = ["axial", "coronal", "sagittal"]; // NiiVue's slice types 0, 1, 2
  const AXIS = [2, 1, 0]; // that each of them cuts
  const ALL_PLANES = 3;
  const OVERLAYS = ["probability", "error", "none"];
  const TRUTH = "#ffffff";
  const DECIDED = "#ffe119";
  const OTHERS = ["#56b4e9", "#e69f00", "#cc79a7", "#009e73", "#d55e00", "#f0e442", "#0072b2"];
  // Viridis without its yellow, and inferno; below a fifth of the scale both fade out.
  const COLORS = {
    "segcal probability": { R: [68, 59, 33, 94, 122], G: [1, 82, 145, 201, 209], B: [84, 139, 140, 98, 81] },
    "segcal error": { R: [0, 87, 188, 249, 252], G: [0, 16, 55, 142, 255], B: [4, 110, 84, 9, 164] },
  };
  const OPAQUE_FROM = 51;
  const PLAIN = { threshold: Array.from({ length: 99 }, (_, i) => (i + 1) / 100) }; // where there are no curves
  const OPACITY = 0.5;
  const HEADER = 352; // bytes of a NIfTI file before its voxels

  // How far confidence and truth are apart, in 255ths.
  function errorOf(probability, label) {
    return probability.map((p, i) => (label[i] ? 255 - p : p));
  }

  // Steps in memory along x, y and z.
  const strides = ([x, y]) => [1, x, x * y];

  // Along an axis, the slice with the largest sum; the middle one where all are zero.
  function largestSlice(bytes, shape, axis) {
    const sums = new Float64Array(shape[axis]);
    const step = strides(shape)[axis];
    for (let i = 0; i < bytes.length; i++) sums[Math.floor(i / step) % shape[axis]] += bytes[i];
    const best = sums.indexOf(Math.max(...sums));
    return sums[best] > 0 ? best : Math.floor(shape[axis] / 2);
  }

  // The borders between voxels inside and outside in one slice, in units of voxels.
  function outline(bytes, shape, axis, index, least) {
    const [u, v] = [0, 1, 2].filter((other) => other !== axis);
    const step = strides(shape);
    const inside = (i, j) =>
      i >= 0 && j >= 0 && i < shape[u] && j < shape[v] && bytes[i * step[u] + j * step[v] + index * step[axis]] >= least;
    const path = new Path2D();
    const edge = (x, y, toX, toY) => {
      path.moveTo(x, y);
      path.lineTo(toX, toY);
    };
    for (let j = 0; j <= shape[v]; j++) {
      for (let i = 0; i <= shape[u]; i++) {
        const here = inside(i, j);
        if (here !== inside(i - 1, j)) edge(i, j, i, j + 1);
        if (here !== inside(i, j - 1)) edge(i, j, i + 1, j);
      }
    }
    return path;
  }

  // From voxels of a slice to pixels of its tile, as {a, b, ...} of a matrix.
  function tileMatrix(nv, tile, shape, axis) {
    const [u, v] = [0, 1, 2].filter((other) => other !== axis);
    const [left, top, width, height] = tile.leftTopWidthHeight;
    const pixel = (i, j) => {
      const place = [...nv.scene.crosshairPos];
      [place[u], place[v]] = [i, j];
      const mm = nv.frac2mm(place);
      return [left + (width * (mm[u] - tile.leftTopMM[0])) / tile.fovMM[0], top + height * (1 - (mm[v] - tile.leftTopMM[1]) / tile.fovMM[1])];
    };
    const [o, p, q] = [pixel(0, 0), pixel(1, 0), pixel(0, 1)];
    return new DOMMatrix([(p[0] - o[0]) / shape[u], (p[1] - o[1]) / shape[u], (q[0] - o[0]) / shape[v], (q[1] - o[1]) / shape[v], ...o]);
  }

  const digits = (value, places) => (value === null || value === undefined ? "–" : value.toFixed(places));
  const amount = (value) => Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });

  class Viewer {
    constructor(root) {
      this.parts = Object.fromEntries([...root.querySelectorAll("[data-part]")].map((part) => [part.dataset.part, part]));
      this.state = { method: 0, cls: 0, plane: 0, overlay: "probability", step: null };
      this.turn = 0; // of loading: what comes late for an earlier one is dropped
      this.listening = new AbortController();
      this.listen();
      this.ready = this.start();
    }

    async start() {
      const { picture } = this.parts;
      const nv = new niivue.Niivue({
        backColor: [0, 0, 0, 1],
        crosshairColor: [0.35, 0.75, 1, 0.7],
        crosshairWidth: 0.15,
        crosshairWidthUnit: "percent",
        dragAndDropEnabled: false,
        logLevel: "silent",
        multiplanarShowRender: niivue.SHOW_RENDER.NEVER,
        isNearestInterpolation: true,
        isForceMouseClickToVoxelCenters: true,
        loadingText: "",
        fontMinPx: 12,
      });
      this.nv = nv;
      await nv.attachToCanvas(picture);
      picture.removeAttribute("tabindex"); // the stage has the focus, and its own keys
      nv.overlayAlphaShader = OPACITY;
      for (const [name, { R, G, B }] of Object.entries(COLORS)) {
        nv.addColormap(name, { R, G, B, A: [0, 255, 255, 255, 255], I: [0, 64, 128, 191, 255] });
      }
      const draw = nv.drawScene.bind(nv);
      nv.drawScene = () => {
        const told = draw();
        this.drawLines();
        return told;
      };
      nv.onLocationChange = () => this.tell();
    }

    // The place, in voxels.
    get place() {
      const { shape } = this.source;
      return [...this.nv.scene.crosshairPos].map((frac, i) => Math.min(shape[i] - 1, Math.max(0, Math.floor(frac * shape[i]))));
    }

    set place(voxel) {
      this.moveTo(voxel);
      this.nv.drawScene();
      this.tell();
    }

    moveTo(voxel) {
      const { shape } = this.source;
      this.nv.scene.crosshairPos = voxel.map((index, i) => (Math.min(shape[i] - 1, Math.max(0, index)) + 0.5) / shape[i]);
    }

    volume(kind, method, cls) {
      const key = `${kind} ${method} ${cls}`;
      if (!this.volumes.has(key)) this.volumes.set(key, this.source.volume(kind, method, cls));
      return this.volumes.get(key);
    }

    async show(source) {
      const turn = ++this.turn;
      const { parts, state } = this;
      parts.wait.hidden = false;
      parts.wait.textContent = "Loading …";
      Object.assign(this, { source, volumes: new Map(), labels: [], bytes: null });
      state.cls = Math.min(state.cls, source.classes.length - 1);
      state.method = Math.min(state.method, source.methods.length - 1);
      this.fill();
      try {
        const image = source.hasImage ? this.volume("image", null, null) : null;
        const [ground] = await Promise.all([image, this.load(turn), this.ready]);
        if (turn !== this.turn) return;
        await this.showVolumes(ground, turn);
        if (turn !== this.turn) return;
        parts.wait.hidden = true;
        parts.stage.dataset.shown = source.case;
        await this.loadOthers(turn);
      } catch (error) {
        if (turn !== this.turn) return;
        parts.wait.hidden = false;
        parts.wait.textContent = `This case cannot be shown: ${error.message ?? error}`;
      }
    }

    // The probability and the label of what is chosen.
    async load(turn) {
      const { method, cls } = this.state;
      const wanted = [this.volume("probability", method, cls), this.source.hasLabels ? this.volume("label", null, cls) : null];
      const [probability, label] = (await Promise.all(wanted)).map((file) => file && file.subarray(HEADER));
      if (turn !== this.turn || method !== this.state.method || cls !== this.state.cls) return false;
      this.bytes = { probability, label, error: label && errorOf(probability, label) };
      if (label) this.labels[cls] = label;
      return true;
    }

    async loadOthers(turn) {
      if (!this.source.hasLabels) return;
      for (let cls = 0; cls < this.source.classes.length; cls++) {
        const label = await this.volume("label", null, cls);
        if (turn !== this.turn) return;
        this.labels[cls] = label.subarray(HEADER);
      }
      this.drawLines();
    }

    async showVolumes(ground, turn) {
      const { nv, source } = this;
      const make = (file, colors) => niivue.NVImage.new(file.buffer, "volume.nii", colors, 1, null, 0, 255);
      const file = await this.volume("probability", this.state.method, this.state.cls);
      const [back, over] = await Promise.all([make(ground ?? file, "gray"), make(file, this.colors())]);
      if (turn !== this.turn) return;
      if (!ground) back.img = new Uint8Array(back.img.length);
      over.img = this.shownBytes();
      [over.cal_min, over.colormapType] = [OPAQUE_FROM, 2]; // fades below
      nv.opts.isRadiologicalConvention = source.oriented;
      nv.opts.isOrientationTextVisible = source.oriented;
      nv.scene.pan2Dxyzmm = [0, 0, 0, 1];
      const guide = this.bytes.error ?? this.bytes.probability;
      this.moveTo(source.shape.map((_, axis) => largestSlice(guide, source.shape, axis)));
      this.setPlanes();
      nv.volumes = [back, over];
      nv.setVolume(back, 0); // which draws it all
      this.tell();
    }

    shownBytes() {
      const { bytes, state } = this;
      return state.overlay === "error" && bytes.error ? bytes.error : bytes.probability;
    }

    colors() {
      return `segcal ${this.state.overlay === "error" ? "error" : "probability"}`;
    }

    async refresh() {
      const turn = this.turn;
      if (!this.nv?.volumes?.[1] || !(await this.load(turn))) return;
      const over = this.nv.volumes[1];
      over.img = this.shownBytes();
      over.colormap = this.colors();
      over.opacity = this.state.overlay === "none" ? 0 : 1;
      [over.cal_min, over.cal_max] = [OPAQUE_FROM, 255];
      this.nv.updateGLVolume();
      this.tell();
    }

    setPlanes() {
      const { nv, parts, state, source } = this;
      const flat = source.shape[2] === 1;
      if (flat) state.plane = 0;
      nv.opts.sliceType = ALL_PLANES;
      nv.customLayout = parts.alone.checked || flat ? [{ sliceType: state.plane, position: [0, 0, 1, 1] }] : this.layout();
    }

    drawPlanes() {
      this.setPlanes();
      this.nv.drawScene();
      this.tell();
    }

    // The chosen plane is the large one; the others are beside it, or below where the window is narrow.
    layout() {
      const { clientWidth, clientHeight } = this.parts.stage;
      const upright = clientWidth < clientHeight;
      const tile = (sliceType, [start, across, length, width]) => ({ sliceType, position: upright ? [across, start, width, length] : [start, across, length, width] });
      const others = [0, 1, 2].filter((plane) => plane !== this.state.plane);
      return [tile(this.state.plane, [0, 0, 0.64, 1]), ...others.map((plane, i) => tile(plane, [0.65, i / 2, 0.35, 0.5]))];
    }

    get curve() {
      return this.source.curves?.[this.state.method]?.[this.state.cls] ?? PLAIN;
    }

    nearest(threshold) {
      const distances = this.curve.threshold.map((t) => Math.abs(t - threshold));
      return distances.indexOf(Math.min(...distances));
    }

    get threshold() {
      return this.curve.threshold[this.state.step] ?? 0.5;
    }

    drawLines() {
      const { lines, contours, picture } = this.parts;
      const { source, nv } = this;
      [lines.width, lines.height] = [picture.width, picture.height];
      if (!contours.checked || !this.bytes) return;
      const pen = lines.getContext("2d");
      for (const tile of nv.screenSlices) {
        const axis = AXIS[tile.axCorSag];
        if (axis === undefined) continue;
        const matrix = tileMatrix(nv, tile, source.shape, axis);
        const index = this.place[axis];
        const line = (bytes, least, color, width) => {
          const path = new Path2D();
          path.addPath(outline(bytes, source.shape, axis, index, least), matrix);
          pen.lineWidth = (width + 1.5) * devicePixelRatio;
          pen.strokeStyle = "#000a";
          pen.stroke(path);
          pen.lineWidth = width * devicePixelRatio;
          pen.strokeStyle = color;
          pen.stroke(path);
        };
        pen.save();
        pen.beginPath();
        pen.rect(...tile.leftTopWidthHeight);
        pen.clip();
        this.labels.forEach((bytes, cls) => bytes && cls !== this.state.cls && line(bytes, 1, OTHERS[cls % OTHERS.length], 1));
        line(this.bytes.probability, Math.max(1, Math.round(this.threshold * 255)), DECIDED, 2);
        if (this.bytes.label) line(this.bytes.label, 1, TRUTH, 2);
        pen.restore();
      }
    }

    // What can be chosen for this case.
    fill() {
      const { parts, source } = this;
      const options = (names) => names.map((name, i) => new Option(name, i));
      parts.class.replaceChildren(...options(source.classes));
      parts.method.replaceChildren(...options(source.methods));
      parts.class.closest("label").hidden = source.classes.length < 2;
      parts.method.closest("label").hidden = source.methods.length < 2;
      const flat = source.shape[2] === 1;
      for (const part of [parts.plane, parts.alone]) part.closest("label").hidden = flat;
      parts.slice.closest("div").hidden = flat;
      parts.worst.hidden = flat || !source.hasLabels;
      parts.overlay.options[1].disabled = parts.overlay.options[1].hidden = !source.hasLabels;
      if (!source.hasLabels && this.state.overlay === "error") this.state.overlay = "probability";
    }

    // All that is written, from the state.
    tell() {
      const { parts, source, state, curve } = this;
      if (!this.bytes || !this.nv.volumes.length) return;
      [parts.class.value, parts.method.value, parts.overlay.value, parts.plane.value] = [state.cls, state.method, state.overlay, state.plane];
      const { place } = this;
      const axis = AXIS[state.plane];
      [parts.slice.max, parts.slice.value] = [source.shape[axis], place[axis] + 1];
      const at = strides(source.shape).reduce((sum, step, i) => sum + step * place[i], 0);
      const label = this.bytes.label ? `, label ${this.bytes.label[at] ? "yes" : "no"}` : "";
      const where = source.shape[2] === 1 ? "" : `${PLANES[state.plane]} ${place[axis] + 1} of ${source.shape[axis]}; `;
      parts.place.textContent = `${where}at the cross: probability ${digits(this.bytes.probability[at] / 255, 2)}${label}`;
      state.step = Math.min(state.step ?? this.nearest(0.5), curve.threshold.length - 1);
      [parts.threshold.max, parts.threshold.value] = [curve.threshold.length - 1, state.step];
      parts.threshold.setAttribute("aria-valuetext", digits(this.threshold, 2));
      parts.numbers.textContent = this.numbers(curve, state.step);
      this.tellKey();
    }

    numbers(curve, step) {
      const told = [`p ≥ ${digits(curve.threshold[step], 2)}`];
      if (curve.dice) told.push(`DSC ${digits(curve.dice[step], 3)}`);
      if (curve.expected) told.push(`expected DSC ${digits(curve.expected[step], 3)}`);
      if (curve.volume_ml) told.push(`volume ${amount(curve.volume_ml[step])} ml`);
      else if (curve.voxels) told.push(`volume ${amount(curve.voxels[step])} voxels`);
      return told.join(", ");
    }

    tellKey() {
      const { source, state } = this;
      const entry = (kind, text, color) => {
        const [item, mark] = [document.createElement("span"), document.createElement("i")];
        mark.className = kind;
        if (color) mark.style.color = color;
        item.append(mark, text);
        return item;
      };
      const entries = state.overlay === "none" ? [] : [entry(`bar ${state.overlay}`, state.overlay === "error" ? "|p − y| 0 to 1" : "probability 0 to 1")];
      if (this.parts.contours.checked) {
        if (source.hasLabels) entries.push(entry("white", `labels: ${source.classes[state.cls]}`));
        entries.push(entry("decided", `p ≥ ${digits(this.threshold, 2)}`));
        source.classes.forEach((name, i) => i !== state.cls && source.hasLabels && entries.push(entry("", name, OTHERS[i % OTHERS.length])));
      }
      this.parts.key.replaceChildren(...entries);
    }

    toSlice(index) {
      const { place } = this;
      place[AXIS[this.state.plane]] = index;
      this.place = place;
    }

    bySlices(number) {
      this.toSlice(this.place[AXIS[this.state.plane]] + number);
    }

    toWorst() {
      if (this.bytes?.error) this.toSlice(largestSlice(this.bytes.error, this.source.shape, AXIS[this.state.plane]));
    }

    toPlane(plane) {
      this.state.plane = plane;
      this.drawPlanes();
    }

    choose(what, value, number) {
      this.state[what] = (value + number) % number;
      this.refresh();
    }

    toStep(step) {
      this.state.step = Math.min(this.curve.threshold.length - 1, Math.max(0, step));
      this.drawLines();
      this.tell();
    }

    toggle(part) {
      const box = this.parts[part];
      box.checked = !box.checked;
      box.dispatchEvent(new Event("change"));
    }

    get keys() {
      const { source, state } = this;
      const overlays = source.hasLabels ? OVERLAYS : [OVERLAYS[0], OVERLAYS[2]];
      return {
        ArrowUp: () => this.bySlices(1),
        ArrowDown: () => this.bySlices(-1),
        PageUp: () => this.bySlices(10),
        PageDown: () => this.bySlices(-10),
        1: () => this.toPlane(0),
        2: () => this.toPlane(1),
        3: () => this.toPlane(2),
        f: () => this.toggle("alone"),
        l: () => this.toggle("contours"),
        c: () => this.choose("cls", state.cls + 1, source.classes.length),
        C: () => this.choose("cls", state.cls - 1, source.classes.length),
        m: () => this.choose("method", state.method + 1, source.methods.length),
        M: () => this.choose("method", state.method - 1, source.methods.length),
        o: () => this.setOverlay(overlays[(overlays.indexOf(state.overlay) + 1) % overlays.length]),
        w: () => this.toWorst(),
        "[": () => this.toStep(state.step - 1),
        "]": () => this.toStep(state.step + 1),
        "?": () => (this.parts.help.open = !this.parts.help.open),
      };
    }

    setOverlay(overlay) {
      this.state.overlay = overlay;
      this.refresh();
    }

    press(event) {
      const act = this.source && this.bytes && !event.ctrlKey && !event.metaKey && !event.altKey ? this.keys[event.key] : null;
      if (!act) return;
      event.preventDefault();
      act();
    }

    listen() {
      const { parts } = this;
      const { signal } = this.listening;
      const on = (part, kind, act) => parts[part].addEventListener(kind, act, { signal });
      on("stage", "keydown", (event) => this.press(event));
      on("class", "change", () => this.choose("cls", Number(parts.class.value), this.source.classes.length));
      on("method", "change", () => this.choose("method", Number(parts.method.value), this.source.methods.length));
      on("overlay", "change", () => this.setOverlay(parts.overlay.value));
      on("plane", "change", () => this.toPlane(Number(parts.plane.value)));
      on("alone", "change", () => this.drawPlanes());
      on("contours", "change", () => (this.drawLines(), this.tell()));
      on("worst", "click", () => this.toWorst());
      on("slice", "input", () => this.toSlice(Number(parts.slice.value) - 1));
      on("threshold", "input", () => this.toStep(Number(parts.threshold.value)));
      on("stage", "pointerdown", () => parts.stage.focus({ preventScroll: true }));
      // Until the picture was clicked, the wheel is the page's.
      const keep = (event) => parts.stage.contains(document.activeElement) || event.stopPropagation();
      parts.stage.addEventListener("wheel", keep, { signal, capture: true, passive: true });
      const sized = new ResizeObserver(() => this.bytes && this.nv.volumes.length && this.drawPlanes());
      sized.observe(parts.stage);
      signal.addEventListener("abort", () => sized.disconnect());
    }

    close() {
      this.turn++;
      this.listening.abort();
      this.ready.then(() => {
        this.nv.cleanup();
        this.nv.gl.getExtension("WEBGL_lose_context")?.loseContext();
      });
    }
  }

  return (root, source) => {
    const viewer = new Viewer(root);
    viewer.show(source);
    return { show: (other) => viewer.show(other), close: () => viewer.close() };
  };
})();
