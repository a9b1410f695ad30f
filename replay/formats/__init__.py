"""Corpus formats of other tools, read into and written from the corpus file; one file each.

A reader is a module with `NAME`, `TEXT`, `matches(record)`, which looks at one parsed record, and
`read(record, source)`, which yields corpus lines as dictionaries. Nothing but the request is
kept: keys that name headers, cookies or credentials stay behind (`replay.formats.secrets`). See
`replay.formats.reading` for the whole way.
"""
