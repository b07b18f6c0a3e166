// Runs the worker of the site's search in a frame where pages are read from a disk, because browsers start no workers
// there. Pages from a server use real workers.
"use strict";

class FrameWorker extends EventTarget {
  constructor(address) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    const inside = this.frame.contentWindow;
    this.listen = (event) => {
      if (event.source !== inside) return;
      const news = new MessageEvent("message", { data: event.data });
      this.dispatchEvent(news);
      if (this.onmessage) this.onmessage(news);
    };
    addEventListener("message", this.listen);
    inside.document.open();
    // The address is the site's own.
    inside.document.write(
      `<script>postMessage = (data) => parent.postMessage(data, "*"); importScripts = () => {};</` +
      `script><script src="${address}"></` + `script>`);
    inside.document.close();
    this.ready = new Promise((loaded) => { inside.onload = loaded; });
  }

  postMessage(data) {
    this.ready.then(() => {
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    });
  }

  terminate() {
    removeEventListener("message", this.listen);
    this.frame.remove();
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
