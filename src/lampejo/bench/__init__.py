"""``lampejo bench``: what decoding costs here, plain and with drafts, beside other engines, and whether it is lossless.

``workloads`` and ``texts`` are what is asked, ``arms`` who drafts, ``measure`` the sections of a run, ``startup`` what
only a fresh process shows, ``peers`` other engines, ``stats``, ``report``, ``page`` and ``plots`` what is made of it.
"""
