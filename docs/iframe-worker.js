// SPDX-License-Identifier: Apache-2.0
// Search runs in a worker, and browsers refuse workers to pages that were opened as files. There, a hidden frame takes
// the worker's place: it loads the same script, and messages are handed over as events.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      this.inner = frame.contentWindow
      this.inner.document.open()
      this.inner.document.write("<body></body>")
      this.inner.document.close()
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = this.inner.document.createElement("script")
          Object.assign(script, { src: new URL(source, document.baseURI).href, onload: resolve, onerror: reject })
          this.inner.document.body.append(script)
        })
      this.inner.importScripts = (...sources) => sources.reduce((before, one) => before.then(() => load(one)), Promise.resolve())
      this.inner.postMessage = (data) => setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })))
      this.ready = load(url)
    }

    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {}
  }
}
