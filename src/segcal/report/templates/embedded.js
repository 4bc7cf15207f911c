// Cases inside the report: volumes and NiiVue lie in the page, compressed, and are unpacked when they come into view.

// The page's policy knows the hash of this script, too, and lets no other in.
async function startNiivue() {
  const script = document.createElement("script");
  script.textContent = new TextDecoder().decode(await unpacked(document.getElementById("niivue").textContent));
  document.head.append(script);
}

function embeddedSource(i) {
  const text = (which) => document.querySelector(`[data-volume="${[i, ...which.map(String)].join(" ")}"]`).textContent;
  const volume = (...which) => unpacked(text(which));
  return { ...DATA.viewed[i], volume };
}

function startViewer() {
  const root = document.querySelector("#viewer [data-viewer]");
  if (!root) return;
  const choice = document.getElementById("viewed");
  let viewer = null;
  const tell = () => {
    const place = CASES.names.indexOf(DATA.viewed[choice.value].case);
    document.getElementById("viewed-link").replaceChildren(...(place < 0 ? [] : [caseLink(place, "numbers of this case")]));
  };
  choice.addEventListener("change", () => {
    viewer?.show(embeddedSource(Number(choice.value)));
    tell();
  });
  const seen = new IntersectionObserver(
    async (entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      seen.disconnect();
      await startNiivue();
      viewer = mountViewer(root, embeddedSource(Number(choice.value)));
    },
    { rootMargin: "400px" },
  );
  seen.observe(root);
  tell();
}

startViewer();
