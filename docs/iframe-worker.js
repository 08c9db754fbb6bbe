// A browser gives a page from a folder no worker, so that the search runs in a hidden frame there.
// The offline plugin of mkdocs-material takes a script of this name for its own.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script src="${url}"></script>`;
      this.inner = new Promise((loaded) => {
        frame.onload = () => loaded(frame.contentWindow);
      });
      this.inner.then((inner) => {
        inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.inner.then((inner) => inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
