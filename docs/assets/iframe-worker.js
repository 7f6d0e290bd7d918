// A page that is opened from disk may not start a worker, so the search would not work there. On file:// a worker is
// a hidden frame instead, in which the worker's script runs. Everywhere else this does nothing.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.post = (data) => inside.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = url;
      this.ready = new Promise((resolve) => script.addEventListener("load", resolve));
      inside.document.body.append(script);
    }
    postMessage(data) {
      this.ready.then(() => this.post(data));
    }
    set onmessage(listener) {
      this.addEventListener("message", listener);
    }
  };
}
