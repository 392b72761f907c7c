"""The page. The only part that knows Gradio; it draws from Rounds and nothing else.

`page` lays out and connects; `live` runs the engine and streams messages, `wire` is their form, `analysis` the regret of a finished run,
`labs` the experiments. What the browser does with it is in `assets/page`.
"""
