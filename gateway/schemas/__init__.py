"""JSON schemas of tools' parameters: one reading, which grammars and the readers of arguments share."""
