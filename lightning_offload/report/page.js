"use strict";
(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 640px)"); // as in the style sheet
  const overTime = ["memory", "lanes"];
  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: false,
  };
  const configOverTime = {
    ...config,
    displayModeBar: narrow.matches ? false : "hover",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]], // the buttons there are: none sends data away
  };

  // "var(--swap)" anywhere in a plot becomes the colour that the theme gives it.
  const painted = (part, style) => {
    if (typeof part === "string") {
      const name = /^var\((--[a-z-]+)\)$/.exec(part);
      return name ? style.getPropertyValue(name[1]).trim() : part;
    }
    if (Array.isArray(part)) return part.map((item) => painted(item, style));
    if (part && typeof part === "object") {
      return Object.fromEntries(Object.entries(part).map(([key, item]) => [key, painted(item, style)]));
    }
    return part;
  };

  const themed = (layout, style) => {
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = {
      gridcolor: colour("--grid"), zerolinecolor: colour("--grid"), linecolor: colour("--rule"),
      tickfont: { size: 12 }, ticks: "", automargin: false,
    };
    const result = {
      ...layout,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("--ink") },
      hoverlabel: {
        align: "left", bgcolor: colour("--card"), bordercolor: colour("--rule"),
        font: { family: getComputedStyle(document.body).fontFamily, color: colour("--ink"), size: 13 },
      },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--rule"), activecolor: colour("--accent") },
    };
    for (const key of Object.keys(layout)) {
      if (!/^[xy]axis\d*$/.test(key)) continue;
      result[key] = { ...axis, ...layout[key] };
      const font = { size: 13, color: colour("--muted") };
      if (result[key].title) result[key].title = { ...result[key].title, font, standoff: key.startsWith("x") ? 10 : 14 };
    }
    return result;
  };

  // A layout with what it has otherwise on a narrow screen, key by key.
  const fitted = (plot) => {
    const layout = structuredClone(plot.layout);
    for (const [key, value] of Object.entries((narrow.matches && plot.narrow) || {})) {
      layout[key] = typeof value === "object" ? { ...layout[key], ...value } : value;
    }
    return layout;
  };

  const draw = () => {
    const style = getComputedStyle(root);
    return Promise.all(Object.entries(plots).map(([name, plot]) => {
      const place = document.getElementById(`plot-${name}`);
      const layout = themed(painted(fitted(plot), style), style);
      place.style.height = `${layout.height}px`;
      if (overTime.includes(name) && place.layout) layout.xaxis.range = place.layout.xaxis.range.slice();
      return Plotly.react(place, painted(plot.data, style), layout, overTime.includes(name) ? configOverTime : config);
    }));
  };

  // Zooming one plot over time zooms the other.
  const link = (from, to) => {
    const [source, target] = [from, to].map((name) => document.getElementById(`plot-${name}`));
    source.on("plotly_relayout", (change) => {
      const moved = Object.keys(change).some((key) => key.startsWith("xaxis.") && !key.includes("autorange"));
      const reset = change["xaxis.autorange"];
      if (!moved && !reset) return;
      const range = reset ? plots[from].layout.xaxis.range : source.layout.xaxis.range;
      const apply = (place) => {
        const now = place.layout.xaxis.range;
        if (now[0] !== range[0] || now[1] !== range[1]) Plotly.relayout(place, { "xaxis.range": range.slice() });
      };
      if (reset) apply(source);
      apply(target);
    });
  };

  document.getElementById("theme").addEventListener("click", () => {
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
    root.dataset.theme = isDark ? "light" : "dark";
    draw();
  });
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);

  draw().then(() => {
    link("memory", "lanes");
    link("lanes", "memory");
    root.dataset.ready = "true";
  });
})();
