/* Search of pages opened from disk: browsers start no worker on file://, so that it runs in a hidden frame. */
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      inside.IFrameWorker = window.IFrameWorker;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) => urls.reduce(
        (done, src) => done.then(() => new Promise((loaded) => {
          const other = inside.document.createElement("script");
          Object.assign(other, { src, onload: loaded });
          inside.document.body.appendChild(other);
        })), Promise.resolve());
      this.ready = new Promise((loaded) => {
        const own = inside.document.createElement("script");
        Object.assign(own, { src: url, onload: loaded });
        inside.document.body.appendChild(own);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
