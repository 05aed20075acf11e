"""Audits the losslessness of any OpenAI-compatible server over HTTP; needs numpy and httpx alone.

This folder imports itself relatively: `outrider audit` runs it as `outrider.client.audit`, and the small wheel
`outrider-audit` installs the same files as `outrider_audit`.
"""
