-- Calls tidegate for the client of a request, and returns the response of tidegate if it denies. Sets txn.tidegate to
-- "allowed" or "undecided" (tidegate or its store is down), and variables for the header fields of allowed responses.

local CHECK = "http://127.0.0.1:8002/v1/check?policy=api&address="
local FIELDS = { limit = "x-ratelimit-limit", remaining = "x-ratelimit-remaining", reset = "x-ratelimit-reset" }

core.register_action("tidegate", { "http-req" }, function(txn)
    local response = core.httpclient():get({ url = CHECK .. txn.sf:src() })
    if response.status == 200 then
        txn:set_var("txn.tidegate", "allowed")
        for variable, name in pairs(FIELDS) do
            txn:set_var("txn." .. variable, (response.headers[name] or {})[0])
        end
    elseif response.status == 0 or response.status >= 500 then
        txn:set_var("txn.tidegate", "undecided")
    else -- denied, or an error that the body explains, such as an unknown policy
        txn:done(txn:reply({ status = response.status, headers = response.headers, body = response.body }))
    end
end)
