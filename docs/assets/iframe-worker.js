// Let the site's search run from a folder: browsers refuse workers of pages at file://, so run the script in a frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.loaded = new Promise((resolve) => {
        document.addEventListener("readystatechange", () => this.start(frame, url, resolve), { once: true })
        if (document.body) this.start(frame, url, resolve)
      })
    }

    start(frame, url, resolve) {
      if (frame.isConnected) return
      document.body.append(frame)
      const room = frame.contentWindow
      room.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = room.document.createElement("script")
      script.src = url
      script.onload = () => resolve(room)
      room.document.body.append(script)
    }

    postMessage(data) {
      this.loaded.then((room) => room.dispatchEvent(new room.MessageEvent("message", { data })))
    }
  }
}
