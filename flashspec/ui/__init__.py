"""The page. The only part that knows Gradio; it draws from Rounds and nothing else.

`page` lays out and connects, `live` runs the engine and packs Rounds into messages; what the browser does with them is in
`assets/live.js`, how it looks in `assets/style.css`.
"""
