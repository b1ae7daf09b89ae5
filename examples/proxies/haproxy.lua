-- Asks tidegate about a request's client, and answers in its words when it says no. Sets txn.tidegate to "allowed" or
-- "undecided" (tidegate or its store is down), and variables for the header fields of an allowed request's answer.

local CHECK = "http://127.0.0.1:8002/v1/check?policy=api&address="
local FIELDS = { limit = "x-ratelimit-limit", remaining = "x-ratelimit-remaining", reset = "x-ratelimit-reset" }

core.register_action("tidegate", { "http-req" }, function(txn)
    local answer = core.httpclient():get({ url = CHECK .. txn.sf:src() })
    if answer.status == 200 then
        txn:set_var("txn.tidegate", "allowed")
        for variable, name in pairs(FIELDS) do
            txn:set_var("txn." .. variable, (answer.headers[name] or {})[0])
        end
    elseif answer.status == 0 or answer.status >= 500 then
        txn:set_var("txn.tidegate", "undecided")
    else -- denied; or a mistake, such as a policy that tidegate does not know, which it explains
        txn:done(txn:reply({ status = answer.status, headers = answer.headers, body = answer.body }))
    end
end)
