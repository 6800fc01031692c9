"""An engine serves its ranks' payloads on its side channel; another fetches and compares them.

No transport is used. Either side may be hostile: a server survives every request, a client every
answer. Nothing is imported here, so that ``connection``, for a probe of health, needs no layouts.
"""
