"""Where models come from: the catalogue of families, packed assets, the hub, the package mirror.

The only part that knows files, hub ids and downloads. Nothing is fetched at import.
"""
